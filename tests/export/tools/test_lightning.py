"""Lightning: the Trainer's section, for any model; the rest is the module's."""

from typing import Any

import yaml

from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, FSDP, source


def test_the_trainers_section_holds_precision_and_accumulation() -> None:
    made = write(tool_named("lightning"), source(**CASES["full"]))
    trainer: dict[str, Any] = yaml.safe_load(made.files["lightning.yaml"])["trainer"]
    assert (trainer["precision"], trainer["accumulate_grad_batches"], trainer["devices"]) == (
        "bf16-true",
        4,
        1,
    )
    assert {each.knob for each in made.departures} == {
        "micro_batch_size",
        "activation_checkpointing",
    }


def test_any_model_can_be_trained_with_it() -> None:
    made = write(tool_named("lightning"), source("cpu", "custom", {"weights": "x"}))
    assert yaml.safe_load(made.files["lightning.yaml"])["trainer"]["accelerator"] == "cpu"


def test_gradients_that_live_on_through_the_next_forward_are_told() -> None:
    def said(accumulated: int) -> set[str]:
        sizes = {"micro_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
        return {each.knob for each in write(tool_named("lightning"), source(**sizes)).departures}

    assert said(1) == {"micro_batch_size", "gradient_accumulation_steps"}
    assert said(4) == {"micro_batch_size"}  # where they were there when it was measured, too


def test_fsdp_is_ddp_on_a_cpu_where_lightning_refuses_it() -> None:
    made = write(tool_named("lightning"), source("cpu", **FSDP))
    assert (
        yaml.safe_load(made.files["lightning.yaml"])["trainer"]["strategy"]
        == "ddp_find_unused_parameters_true"
    )
    assert [each.may_not_fit for each in made.departures if each.knob in FSDP] == [True, True]
