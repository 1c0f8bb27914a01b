"""Only changes that bring something are made, and each says what."""

from dataclasses import replace
from typing import Any

from autofit.api.worth import Worth, worth_changing
from autofit.export.importers import IMPORTERS
from autofit.export.source import ExportSource
from tests.export.sources import LINEAR, LORA, source

SWIFT = next(each for each in IMPORTERS if each.tool.name == "msswift")
BEFORE: dict[str, Any] = {**LORA, "precision": "bf16-mixed", "activation_checkpointing": "full"}
AFTER: dict[str, Any] = {
    **BEFORE,
    "activation_checkpointing": "none",
    "optimizer": "adamw-foreach",
    "kernels": "liger",
    "loss": "fused",
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
}


def named(**knobs: Any) -> ExportSource:
    return replace(source(**knobs), targets=LINEAR)


def seconds(config: ExportSource) -> float | None:
    """Checkpointing costs a third; large micro-batches fit with Liger's loss alone."""
    knobs = config.config
    if knobs.micro_batch_size == 4 and knobs.loss != "fused":
        return None
    time = 3.0 if knobs.micro_batch_size == 4 else 3.3
    return time * (4 / 3 if knobs.activation_checkpointing == "full" else 1.0)


def test_what_brings_nothing_stays_as_it_was() -> None:
    before, after = named(**BEFORE), named(**AFTER)
    chosen, gains, unjudged = worth_changing(SWIFT, {}, before, after, seconds, lambda: False)
    assert not unjudged
    assert chosen.config.optimizer == "adamw"
    assert chosen.config.activation_checkpointing == "none"
    told = {gain.keys[0]: gain.speed for gain in gains}
    assert told["use_liger_kernel"] is None  # it would not fit
    assert round(told["gradient_checkpointing"] or 0.0, 3) == 1.333
    sizes = next(gain for gain in gains if "per_device_train_batch_size" in gain.keys)
    assert "gradient_accumulation_steps" in sizes.keys  # they change together
    assert round(sizes.speed or 0.0, 3) == 1.1
    assert sizes.among({"gradient_accumulation_steps"}).keys == ("gradient_accumulation_steps",)


def test_what_does_not_fit_is_left_as_it_was_chosen() -> None:
    before, after = named(**BEFORE), named(**AFTER)
    assert worth_changing(SWIFT, {}, before, after, lambda _: None, lambda: False) == Worth(after)
    assert worth_changing(SWIFT, {}, before, before, seconds, lambda: False) == Worth(before)


def test_without_time_changes_stay_and_are_named() -> None:
    before, after = named(**BEFORE), named(**AFTER)
    chosen, gains, unjudged = worth_changing(SWIFT, {}, before, after, seconds, lambda: True)
    assert chosen == after
    assert gains == ()
    assert {"gradient_checkpointing", "per_device_train_batch_size"} <= set(unjudged)
