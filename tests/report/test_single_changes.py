"""What one knob alone did, as measured: nothing is guessed, and nothing made up of configs that differ in more."""

from collections.abc import Callable

from autofit.core.result import Result
from autofit.report.single_changes import single_changes

Results = Callable[..., Result]


def test_only_what_differs_in_one_knob_is_told_the_fastest_first(result: Results) -> None:
    assert single_changes(result()) == (
        "optimizer adamw-foreach: 0.99 x the speed, peak 1.70 GiB",  # explored, against the explored best
        "precision bf16: 0.98 x the speed, peak 1.40 GiB",  # verified, against the verified best
        "precision fp32: 0.49 x the speed, peak 1.90 GiB",
    )


def test_what_did_not_fit_is_said_so(result: Results, measured: Callable[..., object]) -> None:
    found = result()
    whole = measured(0, 2.4, precision="bf16-mixed")  # the micro-batch alone, and what follows from it
    assert single_changes(result(trials=(*found.trials, whole)))[-1] == "micro_batch_size 8: out of memory"


def test_four_are_enough(result: Results, measured: Callable[..., object]) -> None:
    cuts = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "precision": "bf16-mixed"}
    more = [measured(10 + rank, 1.0, lora_alpha=rank, **cuts) for rank in range(1, 6)]
    assert len(single_changes(result(trials=(*result().trials, *more)))) == 4


def test_without_a_best_nothing_is_told(result: Results) -> None:
    assert single_changes(result(best=None, tiers={}, runner_up=None)) == ()
