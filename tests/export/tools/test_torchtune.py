"""torchtune: builders of its own, one recipe for all weights and one for adapters."""

from typing import Any

import pytest
import yaml

from autofit.core.errors import InputError
from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, LORA, source


def exported(others: dict[str, Any] | None = None, **knobs: Any) -> Export:
    return write(tool_named("torchtune"), source("cuda", "causal-lm", others, **knobs))


def keys(others: dict[str, Any] | None = None, **knobs: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(exported(others, **knobs).files["torchtune.yaml"]))


def departures(**knobs: Any) -> dict[str, bool]:
    return {each.knob: each.may_not_fit for each in exported(None, **knobs).departures}


def test_models_without_a_builder_are_refused() -> None:
    with pytest.raises(
        InputError, match="no builder of torchtune's is known here for openai-community/gpt2"
    ):
        exported({"weights": "openai-community/gpt2"})


def test_the_recipes_get_what_each_reads() -> None:
    full = keys(**CASES["full"])
    assert full["model"] == {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}
    assert (full["optimizer_in_bwd"], full["enable_activation_checkpointing"], full["dtype"]) == (
        False,
        True,
        "bf16",
    )
    lora = keys(**LORA)
    assert lora["model"]["_component_"] == "torchtune.models.llama3_1.lora_llama3_1_8b"
    assert (
        lora["model"]["lora_rank"],
        lora["model"]["lora_alpha"],
        lora["model"]["apply_lora_to_mlp"],
    ) == (
        16,
        32,
        True,
    )
    assert "optimizer_in_bwd" not in lora
    assert lora["lr_scheduler"]["num_cycles"] == 0.0


def test_tied_heads_get_no_adapter() -> None:
    knobs = {"lora_rank": 8, "lora_targets": "all-linear+head"}
    assert keys(None, **knobs)["model"]["apply_lora_to_output"] is True
    tied = exported({"weights": "meta-llama/Llama-3.2-1B"}, **knobs)
    assert "lora_targets" in {each.knob for each in tied.departures}


def test_what_it_does_otherwise_is_named() -> None:
    assert departures(loss="chunked") == {"loss": True}
    assert departures(**{**LORA, "quantization": "int8"}) == {"quantization": True}
    assert departures(**LORA, optimizer_in_backward=True) == {"optimizer_in_backward": True}
    assert departures(optimizer_in_backward=True) == {}
    assert departures(precision="bf16-mixed") == {"precision": False}
    assert departures(activation_offload="cpu") == {"activation_offload": True}
    assert departures(activation_offload="cpu", activation_checkpointing="full") == {}
