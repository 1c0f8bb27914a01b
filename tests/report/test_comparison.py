"""Two runs beside one another: what is not the same in setup and result, and what the machine made of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from autofit.core.measurement import Measurement
from autofit.core.record import Record
from autofit.report.comparison import compare

Records = Callable[..., Record]
NAMES = ("old", "new")


def faster(measurement: Measurement | None, ratio: float = 1.25) -> Any:
    if (
        measurement is None
        or not measurement.samples_per_second
        or not measurement.tokens_per_second
    ):
        return measurement
    return dataclasses.replace(
        measurement,
        samples_per_second=measurement.samples_per_second * ratio,
        tokens_per_second=measurement.tokens_per_second * ratio,
    )


def test_another_version_on_the_same_machine(record: Records) -> None:
    old = record()
    result = old.result
    new = record(
        versions={"autofit": "0.1.0", "torch": "2.14.0"},
        best=faster(result.best),
        tiers={name: faster(each) for name, each in result.tiers.items()},
        runner_up=faster(result.runner_up),
        trials=tuple(map(faster, result.trials)),
    )
    found = compare(old, new, NAMES)
    assert found.setup == (("torch", "2.13.0", "2.14.0"),)
    assert ("best of full", "6,400 tokens/s, 1.50 GiB", "8,000 tokens/s, 1.50 GiB") in found.outcome
    assert found.sentences == (
        "Against the best of old, that of new is 25 % faster.",
        "Both chose the same config.",
        "5 configs were measured to fit in both: in new they are 25 % faster in the median "
        "(from 1.25 to 1.25 times the speed).",
    )


def test_another_budget_and_another_answer(
    record: Records, measured: Callable[..., Measurement]
) -> None:
    old = record()
    small = dataclasses.replace(old.result.budget, device_bytes=2**30)
    best = measured(60, 0.9, precision="bf16-mixed", lora_rank=16, lora_targets="all-linear")
    tiers = {"full": None, "lora": best, "qlora": None}
    new = record(budget=small, best=best, tiers=tiers, trials=(best,), runner_up=None)
    found = compare(old, new, NAMES)
    assert ("budget GiB", "2.00", "1.00") in found.setup
    assert ("best of full", "6,400 tokens/s, 1.50 GiB", "none measured") in found.outcome
    assert ("best: lora_rank", "0", "16") in found.outcome
    assert found.sentences[:2] == (
        "Against the best of old, that of new is 40 % slower.",
        "The best of new differs in: micro-batch 8x1, LoRA 16 all-linear.",
    )
    assert found.sentences[2].startswith("One config was measured to fit in both, bf16-mixed, ")


def test_where_one_fits_nothing(record: Records) -> None:
    empty = record(best=None, tiers={}, trials=(), runner_up=None)
    found = compare(record(), empty, NAMES)
    assert found.sentences == ("In old something fits, in new nothing does.",)
    assert ("best of full", "6,400 tokens/s, 1.50 GiB", "nothing fitted") in found.outcome
    assert compare(empty, empty, NAMES).sentences == ()


def test_where_nothing_was_measured_it_is_not_said_that_nothing_fits(record: Records) -> None:
    predicted = record(best=None, tiers={}, trials=(), runner_up=None, stopped_by="prediction")
    found = compare(record(), predicted, NAMES)
    assert found.sentences == ("In new nothing was measured: all is predicted.",)
    assert ("best of full", "6,400 tokens/s, 1.50 GiB", "none measured") in found.outcome


def test_other_work_is_not_compared(record: Records) -> None:
    found = compare(record(), record(model="another"), NAMES)
    assert (
        found.sentences[0] == "They trained different things, so that their speeds do not compare."
    )
    assert not any("faster" in each or "as fast" in each for each in found.sentences)


def test_as_markdown_and_on_a_terminal(record: Records, shown: Callable[..., str]) -> None:
    found = compare(record(), record(model="a|b"), NAMES)
    assert "| model | tiny-llama | a\\|b |" in found.to_markdown()
    text = shown(found.to_terminal())
    assert "tiny-llama" in text
    assert "a|b" in text
