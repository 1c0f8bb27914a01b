"""What other budgets would run, beside a best of 100 samples/s at 1.50 of 2.00 GiB, and LoRA at 60 and 0.90 GiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.hardware import GIB
from autofit.core.pareto import OtherBudget, Point
from autofit.core.result import Result
from autofit.report.other_budgets import least_that_fits, other_budget_lines

Results = Callable[..., Result]
Points = Callable[..., Point]
SMALL = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
MORE, LESS = OtherBudget("twice as much", 4 * GIB), OtherBudget("half of it", GIB)


def told(result: Results, other: OtherBudget, *full: Point, **changes: Any) -> list[str]:
    frontier = {"full": full, "lora": changes.pop("lora", ()), "qlora": ()}
    others = {"other_budgets": (other,), "predicted": True}
    return other_budget_lines(result(**{"frontier": frontier, **others, **changes}))


@pytest.fixture
def here(point: Points) -> Point:
    """The best itself."""
    return point(100, 1.5, seen=True, precision="bf16-mixed", **SMALL)


def test_what_more_memory_brings(result: Results, point: Points, here: Point) -> None:
    more = point(
        114, 3.0, precision="bf16-mixed", micro_batch_size=4, gradient_accumulation_steps=2
    )
    assert told(result, MORE, here, more) == [
        "4.00 GiB (twice as much): 14 % faster with micro-batch 4x2 (predicted)"
    ]
    card = OtherBudget("the next larger card", 4 * GIB, "NVIDIA L4")
    assert told(result, card, here, more)[0].startswith(
        "4.00 GiB (the next larger card, such as NVIDIA L4): 14 % "
    )


def test_more_memory_may_bring_nothing(result: Results, point: Points, here: Point) -> None:
    nothing = ["4.00 GiB (twice as much): no gain is expected"]
    assert told(result, MORE, here) == nothing
    assert told(result, MORE, here, point(100.2, 3.0)) == nothing
    assert told(result, MORE, here, point(110, 1.9)) == nothing  # which fits already
    assert told(result, MORE, here, point(90, 5.0)) == nothing


def test_budgets_of_which_the_same_is_told_share_a_line(
    result: Results, point: Points, here: Point
) -> None:
    more = point(114, 2.4, precision="bf16", **SMALL)
    others = (LESS, OtherBudget("a quarter more", int(2.5 * GIB)), MORE)
    (less, more_memory) = told(result, MORE, here, more, other_budgets=others)
    assert less == "1.00 GiB (half of it): nothing is expected to fit"
    assert (
        more_memory
        == "2.50 GiB (a quarter more) and 4.00 GiB (twice as much): 14 % faster with bf16 (predicted)"
    )


def test_what_tied_with_the_best_is_not_called_faster_for_less_memory(
    result: Results, point: Points, here: Point
) -> None:
    tied = point(102, 0.9, precision="bf16", **SMALL)
    assert told(result, LESS, tied) == ["1.00 GiB (half of it): no slower with bf16 (predicted)"]


def test_of_what_was_not_predicted_nothing_is_told(
    result: Results, point: Points, here: Point
) -> None:
    less = point(50 / 1.02, 0.9, seen=True, **SMALL)  # explored at 50 when the best reached 102
    assert told(result, MORE, here, predicted=False) == []
    assert told(result, LESS, here, predicted=False) == []
    assert told(result, LESS, less, here, predicted=False) == [
        "1.00 GiB (half of it): 51 % slower with fp32 (measured)"
    ]


def test_what_less_memory_would_run(result: Results, point: Points, here: Point) -> None:
    less = point(70, 0.9, precision="bf16-mixed", activation_checkpointing="full", **SMALL)
    assert told(result, LESS, less, here) == [
        "1.00 GiB (half of it): 30 % slower with checkpointing full (predicted)"
    ]
    assert told(result, LESS, here) == ["1.00 GiB (half of it): nothing is expected to fit"]
    enough = OtherBudget("a little less", int(1.6 * GIB))
    assert told(result, enough, here) == [
        "1.60 GiB (a little less): what is the best here fits there, too"
    ]


def test_many_changes_are_told_as_a_whole_config(
    result: Results, point: Points, here: Point
) -> None:
    far = point(
        114,
        3.0,
        precision="bf16",
        optimizer="adamw-8bit",
        attention="eager",
        activation_checkpointing="full",
    )
    (line,) = told(result, MORE, here, far)
    assert line.endswith(
        "with bf16, micro-batch 8x1, checkpointing full, adamw-8bit, eager attention (predicted)"
    )


def test_tiers_are_told_apart_and_compared_with_their_own_best(
    result: Results, point: Points, here: Point
) -> None:
    adapters = {"precision": "bf16-mixed", "lora_rank": 16, "lora_targets": "all-linear"}
    # Explored at 60 beside a best explored at 102 that runs at 100 when verified.
    leader = point(60 / 1.02, 0.9, seen=True, **adapters)
    faster = point(60 / 1.02 * 1.5, 3.0, **{**adapters, "precision": "bf16"})
    more = point(120, 3.0, precision="fp32", **SMALL)
    assert told(result, MORE, here, more, lora=(leader, faster)) == [
        "4.00 GiB (twice as much), full: 20 % faster with fp32 (predicted)",
        "4.00 GiB (twice as much), lora: 50 % faster with bf16 (predicted)",
    ]
    assert told(result, MORE, here, lora=(leader,)) == [
        "4.00 GiB (twice as much): no gain is expected"
    ]
    assert told(result, LESS, here, lora=(leader,)) == [
        "1.00 GiB (half of it), full: nothing is expected to fit",
        "1.00 GiB (half of it), lora: what is the best here fits there, too",
    ]


def test_a_tier_that_more_memory_opens(result: Results, point: Points, here: Point) -> None:
    tiers = {"full": result().best}
    opened = point(40, 3.0, lora_rank=8, lora_targets="attention")
    assert told(result, MORE, here, lora=(opened,), tiers=tiers) == [
        "4.00 GiB (twice as much), full: no gain is expected",
        "4.00 GiB (twice as much), lora: 2,560 tokens/s with fp32, micro-batch 8x1, LoRA 8 attention, adamw, "
        "sdpa attention (predicted)",
    ]
    unmeasured = point(40, 1.0, lora_rank=8, lora_targets="attention")  # it is no matter of memory
    assert told(result, MORE, here, lora=(unmeasured,), tiers=tiers) == [
        "4.00 GiB (twice as much), full: no gain is expected"
    ]


def test_where_nothing_fits_more_memory_opens_all(result: Results, point: Points) -> None:
    nothing = {"best": None, "tiers": {}, "runner_up": None}
    one = point(40, 3.0, precision="bf16")
    (line,) = told(result, MORE, one, **nothing)
    assert line.startswith("4.00 GiB (twice as much): 2,560 tokens/s with bf16,")
    assert told(result, LESS, one, **nothing) == []


def test_samples_are_told_where_no_tokens_are_counted(result: Results) -> None:
    config = result().best.config
    nothing = {"best": None, "tiers": {}, "runner_up": None}
    (line,) = told(result, MORE, Point(config, 3 * GIB, 12.5, None, False), **nothing)
    assert "12.5 samples/s with" in line


def test_the_smallest_budget_in_which_anything_fits(result: Results, point: Points) -> None:
    assert least_that_fits(result()) is None
    points = {"full": (point(10, 1.2), point(20, 3.0)), "lora": (point(8, 1.1),), "qlora": ()}
    found = least_that_fits(result(frontier=points))
    assert found == (int(1.1 * GIB), points["lora"][0])
