"""Counting a space: exactly where it is small, and close to the truth where it is estimated."""

import itertools

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.search import count as count_module
from autofit.search.count import Count, count_configs
from autofit.search.space import Space

KNOBS = {
    "rank": (8, 16, 0),
    "targets": ("all", "attention"),
    "bits": (4, 8, None),
    "micro": (1, 2, 3, 4),
    "a": tuple(range(6)),
    "b": tuple(range(6)),
}
SPACE = Space("s", "d", KNOBS)


def settle(knobs):
    """Targets and bits mean nothing at rank 0, and a micro-batch of 3 contradicts the rest."""
    if knobs["micro"] == 3:
        raise InputError("3 divides nothing")
    return Config({**knobs, **({} if knobs["rank"] else {"targets": None, "bits": None})})


def refuse(config):
    return "not these two" if config["a"] == config["b"] or (config["bits"] == 4 and config["a"] > 2) else None


def truth() -> int:
    distinct = set()
    for row in itertools.product(*KNOBS.values()):
        try:
            config = settle(dict(zip(KNOBS, row, strict=True)))
        except InputError:
            continue
        if refuse(config) is None:
            distinct.add(config)
    return len(distinct)


def test_a_small_space_is_counted() -> None:
    assert count_configs(SPACE, settle, refuse) == Count(truth(), exact=True)


@pytest.mark.parametrize("seed", range(5))
def test_a_large_one_is_estimated_within_a_few_percent(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_module, "_ENUMERATED", 10)
    estimate = count_configs(SPACE, settle, refuse, seed=seed)
    assert not estimate.exact
    assert estimate.configs == pytest.approx(truth(), rel=0.08)
    assert estimate == count_configs(SPACE, settle, refuse, seed=seed)


def test_where_all_is_refused_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_module, "_ENUMERATED", 10)
    assert count_configs(SPACE, settle, lambda config: "never").configs == 0
