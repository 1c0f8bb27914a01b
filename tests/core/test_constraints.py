"""The canonical form, and that no more of it is worked out than is asked for."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError


def targets(config: Config) -> Value:
    return config["targets"] if config["rank"] else None


def heads(config: Config) -> Value:
    return config["heads"] if config["targets"] else 0  # known only when targets are


def steps(config: Config) -> Value:
    if config["micro"] == 3:
        raise InputError("3 divides nothing.")
    return 8 // int(str(config["micro"]))


RULES = Constraints(
    off={"rank": 0, "targets": "all", "heads": 2, "micro": 8, "steps": None},
    canonicalize={"targets": targets, "heads": heads, "steps": steps},
)


def eager(knobs: dict[str, Value]) -> Config:
    """The definition: canonicalize all, until nothing changes."""
    config = Config({**RULES.off, **knobs})
    while True:
        settled = config.replace(
            **{knob: canonicalize(config) for knob, canonicalize in RULES.canonicalize.items()}
        )
        if settled == config:
            return config
        config = settled


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    "given", [{}, {"targets": "some"}, {"targets": None}, {"micro": 2}, {"heads": 7, "steps": 5}]
)
def test_the_canonical_config_is_where_settling_comes_to_rest(
    rank: int, given: dict[str, Value]
) -> None:
    config = RULES.canonical({"rank": rank, **given})
    assert config == eager({"rank": rank, **given})
    assert RULES.canonical(config) == config
    assert tuple(config) == tuple(RULES.off)
    assert type(config) is Config


def test_knobs_that_contradict_each_other() -> None:
    with pytest.raises(InputError, match="3 divides nothing"):
        RULES.canonical({"micro": 3})


def lazy(given: dict[str, Value]) -> tuple[Config, list[str]]:
    reads: list[str] = []
    knobs = {**RULES.off, **given}

    def read(name: str) -> Value:
        reads.append(name)
        return knobs[name]

    return RULES.read_lazily(tuple(knobs), read), reads


def test_only_what_an_answer_hangs_on_is_read() -> None:
    config, reads = lazy({"micro": 3})  # whose contradiction nobody comes upon
    assert reads == []
    assert config["targets"] is None
    assert set(reads) == {"targets", "rank"}
    assert config["heads"] == 0
    assert set(reads) == {"targets", "rank", "heads"}
    with pytest.raises(InputError):
        config["steps"]
    assert config.get("unknown") is None
    assert "unknown" not in config


@pytest.mark.parametrize(
    "look",
    [
        hash,
        dict,
        len,
        list,
        repr,
        copy.copy,
        lambda config: config == {},
        lambda config: Config(rank=1) == config,
        lambda config: config.replace(rank=1),
        lambda config: config.differences({}),
        lambda config: config.key,
        lambda config: {**config},
        lambda config: config.items(),
    ],
)
def test_what_looks_at_the_whole_reads_the_whole(look: Any) -> None:
    config, reads = lazy({"rank": 4})
    result = look(config)
    list(result) if isinstance(result, Config | dict) or hasattr(result, "__iter__") else None
    assert set(reads) == set(RULES.off)


def test_it_is_as_good_as_the_canonical_config() -> None:
    for rank, micro in itertools.product((0, 4), (1, 8)):
        given: dict[str, Value] = {"rank": rank, "micro": micro}
        config, canonical = lazy(given)[0], RULES.canonical(given)
        assert config == canonical
        assert canonical == config
        assert hash(config) == hash(canonical)
        assert config.key == canonical.key
        assert copy.copy(config) == canonical
