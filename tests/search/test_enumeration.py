"""The legal configs of a space are those that trying every combination would find, in the same order."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.hardware.catalogue import card, hardware_of
from autofit.models import resolve
from autofit.search import decision_diagram, enumeration
from autofit.search.enumeration import Count, Enumeration
from autofit.search.space import load_space
from autofit.tuning.space import knob_choices

Knobs = Mapping[str, tuple[Value, ...]]
CPU = Hardware("cpu", "a CPU", 8 * GIB, 8 * GIB, 8 * GIB, 2)


def canonical_by_trying(knobs: Knobs, constraints: Constraints) -> tuple[Config, ...]:
    found: dict[Config, None] = {}
    for row in itertools.product(*knobs.values()):
        try:
            found.setdefault(constraints.canonical(dict(zip(knobs, row, strict=True))))
        except InputError:
            continue
    return tuple(found)


def not_refused(configs: tuple[Config, ...], constraints: Constraints) -> tuple[Config, ...]:
    return tuple(
        config
        for config in configs
        if not any(refuse(config) for refuse in constraints.refuse.values())
    )


def chance(*of: object) -> float:
    """The same for the same arguments, and told apart by type: 1 is not True."""
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "big") / 2**64


def random_settle(
    name: str, before: list[str], seed: int, made: Value
) -> Callable[[Config], Value]:
    """Keeps the knob or makes it something else, by what some knobs are that do not hang on it."""

    def canonicalize(config: Config) -> Value:
        seen: list[Value] = []
        for knob in before:
            if chance(seed, name, seen, "enough") < 0.3:
                break
            seen.append(config[knob])
        if seen and chance(seed, name, seen, "contradiction") < 0.08:
            raise InputError("they contradict each other.")
        if chance(seed, name, seen, "own") < 0.3:
            seen.append(config[name])
        return made if chance(seed, name, seen) < 0.4 else config[name]

    return canonicalize


def random_refuse(name: str, knobs: list[str], seed: int) -> Callable[[Config], str | None]:
    def refuse(config: Config) -> str | None:
        seen: list[Value] = []
        for knob in knobs:
            if chance(seed, name, seen, "enough") < 0.2:
                break
            seen.append(config[knob])
        return "no" if seen and chance(seed, name, seen) < 0.4 else None

    return refuse


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Knobs, Constraints]:
    """A few knobs, one that is never searched, and rules of which some read everything."""
    values = st.lists(
        st.sampled_from([0, 1, 2, True, False, None, 1.0, "a", "b"]), min_size=1, max_size=4
    )
    names = list("abcde"[: draw(st.integers(1, 5))])
    knobs = {
        name: tuple({(type(each), each): each for each in draw(values)}.values()) for name in names
    }
    order, seed = draw(st.permutations([*names, "z"])), draw(st.integers(0, 10**6))
    canonicalize = {
        name: random_settle(name, order[:place], seed, draw(st.sampled_from([None, 7, 1, "a"])))
        for place, name in enumerate(order)
        if draw(st.booleans())
    }
    refuse = {
        f"{name}?": random_refuse(name, draw(st.permutations(order)), seed)
        for name in names
        if draw(st.booleans())
    }
    if draw(st.integers(0, 4)) == 0:
        refuse["all?"] = lambda config: (
            "no" if chance(seed, sorted(map(repr, config.items()))) < 0.3 else None
        )
    return knobs, Constraints({"z": draw(st.sampled_from([None, 0]))}, canonicalize, refuse)


@settings(max_examples=300, deadline=None)
@given(spaces())
def test_random_rules(space: tuple[Knobs, Constraints]) -> None:
    knobs, constraints = space
    canonical = canonical_by_trying(knobs, constraints)
    expected = not_refused(canonical, constraints)
    found = Enumeration(knobs, constraints)
    assert found.count() == Count(len(expected), exact=True)
    assert found.count(refused=True) == Count(len(canonical), exact=True)
    if canonical:
        configs = found.configs()
        assert configs == expected
        assert [tuple(config.items()) for config in configs] == [
            tuple(config.items()) for config in expected
        ]
    else:
        with pytest.raises(InputError, match="contradict each other"):
            found.configs()


@settings(max_examples=60, deadline=None)
@given(space=spaces(), answers=st.sampled_from([5, 1000]), states=st.sampled_from([2, 1000]))
def test_rules_that_read_too_much_to_be_known_beforehand(
    space: tuple[Knobs, Constraints], answers: int, states: int
) -> None:
    knobs, constraints = space
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision_diagram, "_MOST_ANSWERS", answers)
        patch.setattr(enumeration, "_MOST_STATES", states)
        found = Enumeration(knobs, constraints)
    canonical = canonical_by_trying(knobs, constraints)
    expected = not_refused(canonical, constraints)
    assert found.count() == Count(len(expected), exact=True)
    if canonical:
        assert found.configs() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": (0, 4), "optimizer": ("adamw", "adamw-8bit")},
        {
            "lora_targets": ("attention", None, "all-linear", "all-linear+head"),
            "lora_rank": (4, 0),
            "precision": ("bf16",),
        },
        {"micro_batch_size": (3, 4, 5, 8), "precision": ("fp32", "fp8"), "quantization": ("none",)},
        {"compile": ("none", "default"), "lora_rank": (0,), "precision": ("fp32", "tf32", "bf16")},
    ],
)
def test_a_real_space(changes: dict[str, tuple[Value, ...]]) -> None:
    workload = resolve("tiny-llama", effective_batch_size=8)
    knobs = {**load_space("everything", knob_choices(workload, CPU)).knobs, **changes}
    constraints = techniques.constraints(workload, CPU)
    found = Enumeration(knobs, constraints)
    expected = not_refused(canonical_by_trying(knobs, constraints), constraints)
    assert found.configs() == expected
    assert found.count() == Count(len(expected), exact=True)
    assert all(
        techniques.canonicalize(config, workload, CPU) == config for config in expected[::100]
    )
    assert all(techniques.refuse(config, workload, CPU) is None for config in expected[::100])
    assert len(expected) > 100


def test_millions_of_combinations_are_counted_at_once_and_drawn_fairly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hardware = hardware_of(card("h100"))
    workload = resolve("llama-3.1-8b", effective_batch_size=32)
    knobs = load_space("everything", knob_choices(workload, hardware)).knobs
    constraints = techniques.constraints(workload, hardware)
    monkeypatch.setattr(enumeration, "MAX_CONFIGS", 2_000)
    found = Enumeration(knobs, constraints)
    assert found.count().exact
    assert 100_000 < found.count().configs < found.count(refused=True).configs
    drawn = found.configs(seed=1)
    assert len(set(drawn)) == 2_000
    assert drawn == Enumeration(knobs, constraints).configs(seed=1)
    assert drawn != found.configs(seed=2)
    assert drawn[0] == found.configs(seed=2)[0]
    assert not any(
        refuse(config) for config in drawn[::20] for refuse in constraints.refuse.values()
    )
    assert all(constraints.canonical(config) == config for config in drawn[::20])
    # Of as many as there are, a value's share is known exactly; 2,000 that are drawn fairly come close.
    for knob, values in knobs.items():
        for value in values:
            share = (
                Enumeration({**knobs, knob: (value,)}, constraints).count().configs
                / found.count().configs
            )
            if knob != "lora_targets":  # null at rank 0
                assert sum(config[knob] == value for config in drawn) / 2_000 == pytest.approx(
                    share, abs=0.05
                )


def test_each_is_as_likely_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, "MAX_CONFIGS", 6)
    knobs: Knobs = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1, 2)}
    constraints = Constraints(
        canonicalize={"c": lambda config: config["c"] if config["b"] else None},
        refuse={"a": lambda config: "no" if config["a"] == 1 and config["b"] else None},
    )
    found = Enumeration(knobs, constraints)
    every = not_refused(canonical_by_trying(knobs, constraints), constraints)
    seen = Counter(config for seed in range(600) for config in found.configs(seed))
    assert set(seen) == set(every)
    assert seen.pop(every[0]) == 600
    assert all(
        600 * 5 / (len(every) - 1) * 0.7 < times < 600 * 5 / (len(every) - 1) * 1.3
        for times in seen.values()
    )


def test_more_than_the_largest_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, "MAX_CONFIGS", 50)
    knobs = {name: tuple(range(9)) for name in "abcdefghijklmnopqrstuvwxyz"}
    constraints = Constraints(
        refuse={"m": lambda config: "no" if config["m"] == config["z"] else None}
    )
    found = Enumeration(knobs, constraints)
    assert found.count() == Count(9**25 * 8, exact=True)
    drawn = found.configs(seed=3)
    assert len(set(drawn)) == 50
    assert drawn == found.configs(seed=3) != found.configs(seed=4)
    assert drawn[0] == {**dict.fromkeys(knobs, 0), "z": 1}
    assert all(config["m"] != config["z"] for config in drawn)
    assert {config["a"] for config in drawn} == set(range(9)) == {config["z"] for config in drawn}


def test_of_a_large_space_that_a_rule_reads_whole_some_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enumeration, "_MAX_UNREAD", 200)
    monkeypatch.setattr(decision_diagram, "_MOST_ANSWERS", 50)
    knobs = {name: tuple(range(5)) for name in "abcdef"}
    constraints = Constraints(
        refuse={
            "odd": lambda config: (
                "no" if sum(int(str(value)) for value in config.values()) % 2 else None
            ),
            "a": lambda config: "no" if config["a"] != 3 else None,
        }
    )
    found = Enumeration(knobs, constraints)
    assert found.count() == Count(5**5, exact=False)  # no more than what the other rules leave
    drawn = found.configs()
    assert 60 < len(drawn) < 140  # about half of 200
    assert all(config["a"] == 3 and not constraints.refuse["odd"](config) for config in drawn)


def test_rules_entangled_beyond_counting_are_tried_on_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, "_MAX_UNREAD", 500)
    monkeypatch.setattr(enumeration, "_MOST_STATES", 2_000)
    knobs = {name: tuple(range(9)) for name in "abcdefghijkl"}
    pairs = {  # all first halves come before all second halves: 9**6 ways to stand in between
        one + other: lambda config, one=one, other=other: (
            "no" if config[one] == config[other] else None
        )
        for one, other in zip("abcdef", "ghijkl", strict=True)
    }
    found = Enumeration(knobs, Constraints(refuse=pairs))
    drawn = found.configs()
    assert not found.count().exact
    assert 150 < len(drawn) < 350  # (8/9)**6 of 500 are 247
    assert not any(refuse(config) for config in drawn for refuse in pairs.values())


def test_order_is_that_of_the_space() -> None:
    configs = Enumeration({"a": (2, 1), "b": ("x", "y")}, Constraints()).configs()
    assert [tuple(config.values()) for config in configs] == [
        (2, "x"),
        (2, "y"),
        (1, "x"),
        (1, "y"),
    ]


def test_no_knobs_and_nothing_legal() -> None:
    assert Enumeration({}, Constraints(off={"a": 1})).configs() == (Config(a=1),)
    never = Enumeration({"a": (1, 2)}, Constraints(refuse={"a": lambda config: "never"}))
    assert never.configs() == ()
    assert (never.count().configs, never.count(refused=True).configs) == (0, 2)
