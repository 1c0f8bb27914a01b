"""LLaMA-Factory: what its keys hold, and what it does otherwise. Its own parser reads them in test_own_parsers."""

from typing import Any

import pytest
import yaml

from autofit.core.errors import InputError
from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, LORA, source


def exported(**knobs: Any) -> Export:
    return write(tool_named("llamafactory"), source(**knobs))


def keys(**knobs: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(exported(**knobs).files["llamafactory.yaml"]))


def departures(**knobs: Any) -> dict[str, bool]:
    return {each.knob: each.may_not_fit for each in exported(**knobs).departures}


def test_bf16_weights_are_refused_on_a_cpu_as_it_does() -> None:
    with pytest.raises(InputError, match="bfloat16 on a GPU only"):
        write(tool_named("llamafactory"), source("cpu", precision="bf16"))


def test_checkpointing_is_told_by_its_opposite() -> None:
    assert keys()["disable_gradient_checkpointing"] is True
    told = keys(**CASES["full"])
    assert (told["disable_gradient_checkpointing"], told["use_reentrant_gc"]) == (False, False)
    for value in ("alternate", "full:1"):
        assert departures(activation_checkpointing=value) == {"activation_checkpointing": False}
    assert keys(activation_checkpointing="full", activation_offload="cpu")["use_unsloth_gc"] is True
    assert departures(activation_offload="cpu") == {"activation_offload": True}


@pytest.mark.parametrize(
    ("precision", "told"),
    [
        ("fp32", (False, False, False, "float32")),
        ("bf16", (True, False, False, "auto")),
        ("bf16-mixed", (False, True, False, "auto")),
        ("fp16-mixed", (False, False, True, "auto")),
    ],
)
def test_precision(precision: str, told: tuple[Any, ...]) -> None:
    given = keys(precision=precision)
    assert tuple(given[name] for name in ("pure_bf16", "bf16", "fp16", "infer_dtype")) == told
    assert not departures(precision=precision)


def test_adapters_and_quantisation() -> None:
    told = keys(**CASES["qlora"])
    assert (told["finetuning_type"], told["lora_rank"], told["lora_alpha"]) == ("lora", 16, 32)
    assert told["lora_target"].startswith("q_proj,k_proj")
    assert (told["quantization_bit"], told["quantization_type"], told["double_quantization"]) == (
        4,
        "nf4",
        False,
    )
    assert keys()["quantization_bit"] is None
    assert departures(**LORA) == {"precision": True}


def test_ligers_kernels_and_loss_come_together() -> None:
    both = {"kernels": "liger", "loss": "fused"}
    assert keys(**both)["enable_liger_kernel"] is True
    assert not departures(**both)
    assert departures(kernels="liger") == {"loss": False}
    assert departures(loss="fused") == {"loss": False}
    assert departures(loss="chunked") == {"loss": True}
