"""What each knob buys at the best config, which runs 100 samples/s at 1.50 of 2.00 GiB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autofit.core.measurement import Outcome
from autofit.core.pareto import Alternative
from autofit.core.result import Result
from autofit.report.knob_effects import knob_lines, single_changes

Results = Callable[..., Result]
Change = Callable[..., Alternative]


def lines(result: Results, *changes: Alternative) -> list[str]:
    """With the trials that measured ones are of, explored when the best reached 102."""
    seen = [
        replace(
            result().trials[2],
            config=each.config,
            samples_per_second=each.samples_per_second * 1.02,
        )
        for each in changes
        if each.measured and each.fits
    ]
    return knob_lines(
        result(alternatives=changes, runner_up=None, trials=(*result().trials, *seen))
    )


def test_what_buys_the_most_comes_first_and_figures_say_where_they_come_from(
    result: Results, change: Change
) -> None:
    assert lines(
        result,
        change("precision", "bf16", 98, 1.4, seen=True),
        change("activation_checkpointing", "full", 80, 0.9),
        change("optimizer", "adamw-8bit", 60, 2.6),
        change("attention", "eager", 104, 1.75),
    ) == [
        "optimizer adamw-8bit instead of adamw: would need 2.60 GiB (predicted)",
        "activation_checkpointing full instead of none: 20 % slower, 0.60 GiB less (predicted)",
        "precision bf16 instead of bf16-mixed: 2 % slower, 0.10 GiB less (measured)",
        "attention eager instead of sdpa: 4 % faster, 0.25 GiB more (predicted)",
    ]


def test_of_one_knob_the_best_that_is_left_counts(result: Results, change: Change) -> None:
    assert lines(
        result,
        change("precision", "fp32", 50, 1.9),
        change("precision", "bf16", 90, 1.4),
        change("precision", "fp8", 99, 2.4),
    ) == ["precision bf16 instead of bf16-mixed: 10 % slower, 0.10 GiB less (predicted)"]


@pytest.mark.parametrize(
    ("guess", "told"),
    [(89, ""), (90.5, ""), (95, "; adamw-foreach: 5 % slower, the same memory (predicted)")],
)
def test_what_was_measured_is_told_before_a_better_guess(
    result: Results, change: Change, guess: float, told: str
) -> None:
    (line,) = lines(
        result,
        change("optimizer", "adamw-foreach", guess, 1.5),
        change("optimizer", "adamw-8bit", 90, 1.2, seen=True),
    )
    assert (
        line
        == f"optimizer adamw-8bit instead of adamw: 10 % slower, 0.30 GiB less (measured){told}"
    )


def test_where_no_change_fits_the_least_that_is_needed_is_told(
    result: Results, change: Change
) -> None:
    assert lines(
        result, change("precision", "fp32", 50, 2.4), change("precision", "tf32", 60, 2.2)
    ) == ["precision tf32 instead of bf16-mixed: would need 2.20 GiB (predicted)"]
    assert lines(result, change("precision", "fp32", 0, 2.4, seen=True)) == [
        "precision fp32 instead of bf16-mixed: does not fit, took 2.40 GiB (measured)"
    ]
    assert lines(result, change("precision", "fp32", 0, None, seen=True)) == [
        "precision fp32 instead of bf16-mixed: out of memory (measured)"
    ]


def test_what_only_memory_forbids_is_told_beside_what_fits(result: Results, change: Change) -> None:
    assert lines(
        result,
        change("precision", "bf16", 90, 1.4),
        change("precision", "fp8", 112, 2.6),
        change("precision", "tf32", 120, 2.8),
        change("precision", "fp32", 50, 2.2),
    ) == [
        "precision bf16 instead of bf16-mixed: 10 % slower, 0.10 GiB less (predicted); "
        "fp8: 12 % faster, but would need 2.60 GiB (predicted)"
    ]
    (line,) = lines(result, change("precision", "fp8", 112, 2.6))
    assert (
        line
        == "precision fp8 instead of bf16-mixed: 12 % faster, but would need 2.60 GiB (predicted)"
    )


def test_on_a_gpu_the_margin_is_part_of_what_is_needed(result: Results, change: Change) -> None:
    made = result(alternatives=(change("precision", "fp32", 50, 3.8),))
    on_gpu = replace(made, hardware=replace(made.hardware, device="cuda"))
    assert knob_lines(on_gpu) == [
        "precision fp32 instead of bf16-mixed: would need 4.00 GiB (predicted)"
    ]


def test_what_went_wrong_otherwise_is_said(result: Results, change: Change) -> None:
    crashed = replace(change("attention", "flash", 0, None, seen=True), outcome=Outcome.FAILED)
    assert lines(result, crashed) == ["attention flash instead of sdpa: failed (measured)"]


def test_what_buys_nothing_shares_a_line(result: Results, change: Change) -> None:
    assert lines(
        result,
        change("optimizer", "adamw-foreach", 100.2, 1.501),
        change("activation_checkpointing", "full", 80, 0.9),
        change("attention", "eager", 99.8, 1.5),
        change("precision", "bf16", 100, 1.2),
    ) == [
        "activation_checkpointing full instead of none: 20 % slower, 0.60 GiB less (predicted)",
        "precision bf16 instead of bf16-mixed: as fast, 0.30 GiB less (predicted)",
        "nothing, as far as is known: attention and optimizer",
    ]


def test_without_a_best_or_alternatives_nothing_is_told(result: Results, change: Change) -> None:
    assert lines(result) == []
    nothing = result(
        best=None, tiers={}, runner_up=None, alternatives=(change("precision", "fp32", 50, 2.4),)
    )
    assert knob_lines(nothing) == []


def test_only_what_differs_in_one_knob_is_told_the_fastest_first(result: Results) -> None:
    assert (
        single_changes(result())
        == (
            "optimizer adamw-foreach: 0.99 x the speed, peak 1.70 GiB",  # explored, against the explored best
            "precision bf16: 0.98 x the speed, peak 1.40 GiB",  # verified, against the verified best
            "precision fp32: 0.49 x the speed, peak 1.90 GiB",
        )
    )


def test_what_did_not_fit_is_said_so(result: Results, measured: Callable[..., object]) -> None:
    finished = result()
    # the micro-batch alone, and what follows from it
    whole = measured(0, 2.4, precision="bf16-mixed")
    assert (
        single_changes(result(trials=(*finished.trials, whole)))[-1]
        == "micro_batch_size 8: out of memory"
    )


def test_four_are_enough(result: Results, measured: Callable[..., object]) -> None:
    cuts = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "precision": "bf16-mixed"}
    more = [measured(10 + rank, 1.0, lora_alpha=rank, **cuts) for rank in range(1, 6)]
    assert len(single_changes(result(trials=(*result().trials, *more)))) == 4


def test_without_a_best_nothing_is_told(result: Results) -> None:
    assert single_changes(result(best=None, tiers={}, runner_up=None)) == ()
