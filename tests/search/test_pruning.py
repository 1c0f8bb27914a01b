from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.search.proofs import rules_out

# Knobs a, b, c: values 0-3 ranked; 9 and 8 have no rank. d is not ordered at all.
_UNRANKED = (8, 9)


def order(knob: str, value: Any) -> int | None:
    return None if knob == "d" or value in _UNRANKED else value


configs = st.fixed_dictionaries(
    {
        "a": st.sampled_from([0, 1, 2, 3]),
        "b": st.sampled_from([0, 1, 2, 9]),
        "c": st.sampled_from([0, 1, 8, 9]),
        "d": st.sampled_from(["x", "y"]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, 4]),
    }
)


@given(configs)
def test_a_failed_config_rules_itself_out(config: dict[str, Any]) -> None:
    assert rules_out(config, config, order)


@given(configs, configs, configs)
def test_is_transitive(one: dict[str, Any], two: dict[str, Any], three: dict[str, Any]) -> None:
    if rules_out(one, two, order) and rules_out(two, three, order):
        assert rules_out(one, three, order)


@given(configs, configs)
def test_proves_nothing_across_the_border_of_accumulation(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    if (one["gradient_accumulation_steps"] == 1) != (two["gradient_accumulation_steps"] == 1):
        assert not rules_out(one, two, order)


@given(configs, configs)
def test_proves_nothing_where_a_changed_value_has_no_rank(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    changed = [knob for knob in "abcd" if one[knob] != two[knob]]
    if any(order(knob, each[knob]) is None for knob in changed for each in (one, two)):
        assert not rules_out(one, two, order)


def test_the_number_of_accumulation_steps_itself_does_not_matter() -> None:
    assert rules_out(
        {"a": 1, "gradient_accumulation_steps": 8},
        {"a": 2, "gradient_accumulation_steps": 4},
        order,
    )
    assert not rules_out(
        {"a": 2, "gradient_accumulation_steps": 4},
        {"a": 1, "gradient_accumulation_steps": 8},
        order,
    )


def test_a_knob_that_only_one_side_has_is_a_difference() -> None:
    assert not rules_out({"d": "x"}, {}, order)
    assert not rules_out({}, {"d": "x"}, order)


@given(configs, configs, st.integers(0, 10_000))
def test_never_excludes_a_config_that_fits(
    failed: dict[str, Any], candidate: dict[str, Any], seed: int
) -> None:
    """Any memory that rises with the ranks of each knob, all else equal and on one side of the border, agrees."""
    draw = random.Random(seed)
    table: dict[tuple[str, Any, Any, bool], float] = {}

    def memory(config: dict[str, Any]) -> float:
        accumulates = config["gradient_accumulation_steps"] > 1
        total = 0.0
        for knob in "abc":
            # The part of one knob rises with its rank, by steps that depend on all that is not ordered.
            unordered = (
                config["d"],
                *(config[each] for each in "abc" if order(each, config[each]) is None),
            )
            rank = order(knob, config[knob])
            steps = [-1] if rank is None else range(rank + 1)
            total += sum(
                table.setdefault((knob, step, unordered, accumulates), draw.random())
                for step in steps
            )
        return total

    if rules_out(failed, candidate, order):
        assert memory(candidate) >= memory(failed)
