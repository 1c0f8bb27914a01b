"""The explanation in sentences."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement
from autofit.core.pareto import Alternative, OtherBudget, Point
from autofit.core.result import OnDevices, Result
from autofit.report.explain import explain

Results = Callable[..., Result]


def test_every_part_of_the_story_is_told(result: Results) -> None:
    text = explain(result())
    for sentence in (
        "The best config for tiny-llama on a test's CPU within 2.00 GiB is bf16-mixed, micro-batch 2x4, adamw",
        "It trains 6,400 tokens/s at a peak of 1.50 GiB; longer runs verified it.",
        "It is 2.04 times as fast as the first config that fitted (3,200 tokens/s).",
        "The runner-up is 2 % slower; against it the best differs in precision (bf16-mixed instead of bf16).",
        "Of 23 configs 8 were measured: 5 fit, 2 out of memory, 1 refused; 12 ruled out",
        "The nearest miss needs a budget of at least 2.40 GiB: fp32, micro-batch 8x1",
        "The search went through the whole space, after 1 min 23 s.",
    ):
        assert sentence in text


def test_other_numbers_of_devices_are_told_against_its_own(result: Results) -> None:
    one, two, four = (
        OnDevices(1, 9 * GIB, None),
        OnDevices(2, GIB, 100.0),
        OnDevices(4, GIB // 2, 190.0),
    )
    text = explain(result(hardware=result().hardware.of_several(2), on_devices=(one, two, four)))
    assert "by prediction:\n  - 1 device: at most 9.00 GiB of each, which may not fit\n" in text
    assert "  - 4 devices: 1.9 times the speed, at most 0.50 GiB of each" in text
    assert "numbers of devices" not in explain(result())


def test_what_was_not_verified_is_not_called_so(
    result: Results, measured: Callable[..., Measurement]
) -> None:
    only = measured(10)
    text = explain(
        result(
            best=only, trials=(only,), tiers={"full": only}, runner_up=None, stopped_by="interrupt"
        )
    )
    assert "it was not verified" in text
    assert "It was the first that fitted" in text
    assert "The search was interrupted" in text
    assert "runner-up" not in text


def test_figures_of_a_machine_that_drifted_are_not_set_beside_each_other(
    result: Results, measured: Callable[..., Measurement]
) -> None:
    slowly = measured(
        70, 1.5, others={"verified": True}, precision="bf16-mixed", micro_batch_size=2
    )
    first, explored = measured(80, 1.9), replace(slowly, verified=False, samples_per_second=100.0)
    text = explain(
        result(best=slowly, trials=(first, explored), tiers={"full": slowly}, runner_up=None)
    )
    assert "It is 1.25 times as fast as the first config that fitted." in text


@pytest.mark.parametrize(
    ("reached", "at_best", "said"),
    [
        (100.0, 100.0, "The first config that fitted was as fast."),
        (102.0, 100.0, "was 2 % faster, which counts as a tie."),
        (120.0, 100.0, "was 20 % faster for a moment, before it was measured longer."),
        (70.5, 70.0, "was 1 % faster (4,512 tokens/s), which counts as a tie."),
    ],
)
def test_a_first_one_as_fast_is_told_without_figures_of_another_moment(
    result: Results, measured: Callable[..., Measurement], reached: float, at_best: float, said: str
) -> None:
    best = measured(70, 1.5, others={"verified": True}, precision="bf16-mixed", micro_batch_size=2)
    explored = replace(best, verified=False, samples_per_second=at_best)
    text = explain(
        result(
            best=best,
            trials=(measured(reached, 1.9), explored),
            tiers={"full": best},
            runner_up=None,
        )
    )
    assert said in text


def test_where_nothing_fits_the_explanation_is_what_would_help(
    result: Results, measured: Callable[..., Measurement]
) -> None:
    text = explain(result(best=None, tiers={}, runner_up=None, trials=(measured(0, 2.4),)))
    assert text.startswith("Nothing fits")
    assert "--mem 2.4" in text


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (0.021, "more than 2 % faster (at 95 %, by discounted speed)"),
        (-0.2, "is expected to be faster (at 95 %, by discounted speed)"),
        (None, ""),
    ],
)
def test_it_says_what_may_have_been_missed(result: Results, bound: float | None, said: str) -> None:
    text = explain(result(bound=bound))
    assert said in text
    assert ("Nothing that was left" in text) == (bound is not None)


def test_each_part_is_a_paragraph(
    result: Results, change: Callable[..., Alternative], point: Callable[..., Point]
) -> None:
    small = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
    here = point(100, 1.5, seen=True, precision="bf16-mixed", **small)
    text = explain(
        result(
            alternatives=(change("activation_checkpointing", "full", 88, 1.1),),
            frontier={"full": (here, point(110, 3.0, precision="bf16-mixed", micro_batch_size=8))},
            other_budgets=(OtherBudget("twice as much", 4 * GIB),),
            predicted=True,
            notes=("Something to know.",),
        )
    )
    best, knobs, rest, others, notes = text.split("\n\n")
    assert best.startswith("The best config for tiny-llama")
    assert knobs.splitlines() == [
        "What each knob buys, if it alone is changed:",
        "  - activation_checkpointing full instead of none: 12 % slower, 0.40 GiB less (predicted)",
    ]
    assert rest.startswith("Of 23 configs 8 were measured")
    assert others.splitlines() == [
        "With other budgets:",
        "  - 4.00 GiB (twice as much): 10 % faster with micro-batch 8x1 (predicted)",
    ]
    assert notes == "Something to know."


def test_where_nothing_is_known_nothing_is_said(result: Results) -> None:
    text = explain(result())
    assert "What each knob buys" not in text
    assert "other budgets" not in text
