"""What is said when the budget is too small."""

import dataclasses
from collections.abc import Callable

from autofit.core.estimate import Remedy
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, OomSnapshot, Outcome
from autofit.core.pareto import OtherBudget, Point
from autofit.core.result import Result
from autofit.report.explain import explain, nothing_fits_lines, nothing_fits_view, probe_counts
from autofit.report.remedies import measured_remedies, remedy_lines

Results = Callable[..., Result]
Shown = Callable[..., str]
Measured = Callable[..., Measurement]
Points = Callable[..., Point]
NOTHING = {"best": None, "runner_up": None, "tiers": {}}


def test_the_nearest_miss_and_what_would_help_are_named(
    result: Results, measured: Measured
) -> None:
    trials = (
        measured(0, 3.1),
        measured(0, 2.43, precision="bf16", micro_batch_size=1, gradient_accumulation_steps=8),
    )
    workload = {"task": "causal-lm", "sequence_length": 2048, "effective_batch_size": 8}
    text = "\n".join(nothing_fits_lines(result(**NOTHING, trials=trials, workload=workload)))
    assert "Nothing fits: tiny-llama on a test's CPU within 2.00 GiB." in text
    assert "Of 23 configs 2 were measured: 2 out of memory; 12 ruled out" in text
    assert "The nearest miss needs a budget of at least 2.43 GiB: bf16, micro-batch 1x8" in text
    for help in (
        "--mem 2.5\n",
        "--seq-len 1024",
        "--space lora",
        "--set activation_checkpointing=full",
    ):
        assert help in text


def test_what_was_tried_already_is_not_proposed(result: Results, measured: Measured) -> None:
    tried = measured(0, 2.4, lora_rank=8, lora_targets="attention", activation_checkpointing="full")
    text = "\n".join(nothing_fits_lines(result(**NOTHING, trials=(tried,))))
    assert (
        "--space lora" not in text and "checkpointing=full" not in text and "--seq-len" not in text
    )


def test_on_cuda_the_margin_is_part_of_what_is_needed(result: Results, measured: Measured) -> None:
    hardware = dataclasses.replace(result().hardware, device="cuda", name="A card")
    text = "\n".join(
        nothing_fits_lines(result(**NOTHING, trials=(measured(0, 3.8),), hardware=hardware))
    )
    assert "needs a budget of at least 4.00 GiB" in text
    assert "--gpu-mem 4" in text


def test_a_need_that_was_never_told_is_not_made_up(result: Results, measured: Measured) -> None:
    miss = measured(0, 1.7, others={"reason": "needs more than 2.00 GiB"})
    text = "\n".join(nothing_fits_lines(result(**NOTHING, trials=(miss,))))
    assert "The nearest miss needs more than 2.00 GiB" in text
    assert "--mem" not in text


def test_a_search_without_probes_says_so(result: Results) -> None:
    text = "\n".join(nothing_fits_lines(result(**NOTHING, trials=(), skipped={"refused": 23})))
    assert "Of 23 configs 0 were measured; 23 refused beforehand." in text


def test_other_outcomes_are_counted_apart(result: Results, measured: Measured) -> None:
    diverged = measured(
        others={"outcome": Outcome.DIVERGED, "peak_bytes": None, "reason": "the loss is nan"}
    )
    text = "\n".join(nothing_fits_lines(result(**NOTHING, trials=(diverged, measured(0, 2.4)))))
    assert "1 out of memory, 1 diverged" in text


def test_the_smallest_budget_is_told_where_it_is_predicted(
    result: Results, measured: Measured, point: Points
) -> None:
    least = point(5, 2.71, precision="bf16")
    made = result(**NOTHING, trials=(measured(0, 2.43),), frontier={"full": (least, point(9, 5.0))})
    text = "\n".join(nothing_fits_lines(made))
    assert (
        "The smallest budget in which anything is expected to fit is 2.71 GiB: bf16, micro-batch 8x1"
        in text
    )
    assert "sdpa attention (predicted)." in text
    assert "--mem 2.8\n" in text  # not what the nearest miss had taken when it was stopped


def test_what_was_never_reached_but_should_fit_is_told(
    result: Results, measured: Measured, point: Points
) -> None:
    made = result(
        **NOTHING,
        trials=(measured(0, 2.43),),
        frontier={"full": (point(5, 1.2, precision="bf16"),)},
    )
    text = "\n".join(nothing_fits_lines(made))
    assert "Not measured, but expected to fit: bf16" in text
    assert "--mem" not in text


def test_other_budgets_are_told(result: Results, measured: Measured, point: Points) -> None:
    others = (OtherBudget("twice as much", 4 * GIB),)
    frontier = {"full": (point(5, 2.71, precision="bf16"),)}
    made = result(
        **NOTHING,
        trials=(measured(0, 2.43),),
        frontier=frontier,
        other_budgets=others,
        predicted=True,
    )
    assert "With other budgets:\n  - 4.00 GiB (twice as much): 320 tokens/s with bf16" in "\n".join(
        nothing_fits_lines(made)
    )


def test_what_was_left_is_counted(result: Results) -> None:
    for stopped_by, words in (("trials", "not reached"), ("bound", "not expected to be faster")):
        text = probe_counts(result(space_size=30, stopped_by=stopped_by))
        assert text.endswith(
            f"12 ruled out by what another one proved; 3 refused beforehand; 7 {words}."
        )
    assert probe_counts(result(**NOTHING, space_size=30, stopped_by="bound")).endswith(
        "7 not expected to fit."
    )


def test_a_config_that_was_measured_again_counts_once(result: Results) -> None:
    trials = result().trials
    assert probe_counts(result(trials=(*trials, trials[2]))) == probe_counts(result())


def test_what_is_predicted_to_help_is_named_with_its_figures(
    result: Results, measured: Measured
) -> None:
    config = measured(0, 2.4).config
    remedies = (
        Remedy(
            "host", ("--set", "optimizer_offload=cpu"), config, int(1.5 * GIB), 2.0, 4.0, 2000.0
        ),
        Remedy("qlora", ("--set", "quantization=nf4"), config, GIB),
        Remedy("devices", ("--devices", "2"), config, GIB, devices=2),
    )
    text = "\n".join(
        nothing_fits_lines(result(**NOTHING, trials=(measured(0, 2.4),), remedies=remedies))
    )
    _, _, helps = text.partition("What would help:\n")
    first, second, third = helps.splitlines()
    part = "the same learning, with a part of it in host memory; at most 1.50 GiB, 2,000 tokens/s (predicted)"
    assert first == f"  - --set optimizer_offload=cpu: {part}"
    assert second.startswith("  - --set quantization=nf4: QLoRA")
    assert third.startswith("  - --devices 2: more cards")
    assert "--space lora" not in text


def test_without_predictions_a_card_gets_hints_of_all_kinds(
    result: Results, measured: Measured
) -> None:
    hardware = dataclasses.replace(result().hardware, device="cuda", name="A card")
    text = "\n".join(
        nothing_fits_lines(result(**NOTHING, trials=(measured(0, 3.8),), hardware=hardware))
    )
    for help in ("--space qlora", "--set optimizer_offload=cpu", "--devices 2"):
        assert help in text


def test_what_held_memory_in_the_nearest_miss_is_told(result: Results, measured: Measured) -> None:
    shortage = OomSnapshot(
        "backward", GIB, {"weights": GIB, "others": 2 * GIB}, {"weights of block 1": GIB // 2}
    )
    miss = measured(0, 2.4, others={"shortage": shortage})
    assert shortage.words in nothing_fits_lines(result(**NOTHING, trials=(miss,)))
    assert shortage.words in explain(result(nearest_miss=miss))


def test_what_a_search_measured_to_need_less_is_named_the_fastest_first(result: Results) -> None:
    whole = result()
    assert whole.best
    first, *others = measured_remedies(whole, whole.best.config)
    assert first.measured
    assert first.options == ("--set", "precision=bf16")
    assert remedy_lines([first]) == [
        "--set precision=bf16: the same learning, in smaller slices or computed again; at most 1.40 GiB, "
        "6,272 tokens/s (measured)"
    ]
    assert all(
        each.device_bytes < whole.best.peak_bytes.held_bytes
        for each in others
        if whole.best.peak_bytes
    )
    # never measured
    assert measured_remedies(whole, {**whole.best.config, "precision": "fp8"}) == []


def test_a_terminal_shows_points_and_what_was_written(
    result: Results, measured: Measured, shown: Shown
) -> None:
    made = result(
        **NOTHING,
        trials=(measured(0, 2.4),),
        files={"result": None, "report": "runs/x/report.html"},
    )
    lines = [line.rstrip() for line in shown(nothing_fits_view(made), 50).splitlines()]
    start = lines.index("What would help:")
    assert lines[start + 1 : start + 4] == [
        "  - --mem 2.4",
        "  - --space lora, which trains a few added weights",
        "    only",
    ]
    assert lines[-3:] == ["", "Written to runs/x:", "  report.html  all of it to look at"]
