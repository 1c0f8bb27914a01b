"""The table at the end of a search."""

import dataclasses
from collections.abc import Callable

import pytest

from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report import result_table

Results = Callable[..., Result]
Shown = Callable[..., str]


def test_the_table_tells_figures_knobs_and_reasons(result: Results, shown: Shown) -> None:
    text = shown(result_table(result()), 120)
    best = next(line for line in text.splitlines() if "best, verified" in line)
    assert "bf16-mixed, micro-batch 2x4" in best
    assert "6,400" in best and "0.0800" in best and "1.50" in best
    assert "tokens/s" in text and "of 2.00" in text
    assert "0.0784-0.0824" in text
    assert "best of lora, 41 % slower" in text
    assert "In all of them: sdpa attention." in text
    assert "Written: runs/x/train.py" in text


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
def test_any_width_will_do(result: Results, shown: Shown, width: int) -> None:
    assert "best" in shown(result_table(result()), width).replace("\n", "") or width < 40


def test_one_config_alone_is_described_whole(result: Results, shown: Shown) -> None:
    made = result(trials=(), tiers={}, runner_up=None)
    assert "bf16-mixed, micro-batch 2x4, adamw" in " ".join(shown(result_table(made), 120).split())


def test_workloads_without_tokens_are_told_in_samples(
    result: Results, measured: Callable[..., Measurement], shown: Shown
) -> None:
    images = measured(12, others={"tokens_per_second": None})
    text = shown(result_table(result(best=images, trials=(images,), tiers={"full": images}, runner_up=None)))
    assert "samples/s" in text and "12" in text


def test_brackets_in_a_reason_are_no_markup(result: Results, shown: Shown) -> None:
    trials = [each for each in result().trials if each.reason and "[eager]" in each.reason]
    assert "refused: no [eager] here" in shown(result_table(result(trials=tuple(trials))), 120)


def test_a_card_standing_in_for_another_is_named(result: Results, shown: Shown) -> None:
    hardware = dataclasses.replace(result().hardware, device="cuda", name="RTX 4090", measured_on="NVIDIA H200")
    text = shown(result_table(result(hardware=hardware)))
    assert "Speed measured on NVIDIA H200, memory for RTX 4090." in text


def test_a_best_that_was_explored_at_another_speed_says_so(
    result: Results, measured: Callable[..., Measurement], shown: Shown
) -> None:
    words = "What is not verified was measured once, briefly, when the best reached"
    assert words not in shown(result_table(result()), 120)
    best = result().best
    assert best is not None
    explored = dataclasses.replace(best, verified=False, samples_per_second=150.0, tokens_per_second=9600.0)
    trials = (*(each for each in result().trials if each.config != best.config), explored)
    assert f"{words} 9,600 tokens/s." in shown(result_table(result(trials=trials)), 120)


def test_what_may_have_been_missed_is_told_below(result: Results, shown: Shown) -> None:
    assert "Nothing that was left" not in shown(result_table(result()), 120)
    told = shown(result_table(result(bound=0.021)), 120)
    assert "Nothing that was left is expected to be more than 2 % faster (at 95 %)." in told
