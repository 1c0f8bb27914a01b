"""ms-swift: what its keys hold, and what it does otherwise. Its own parser reads them in test_own_parsers."""

from typing import Any

import pytest
import yaml

from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, FSDP, HSDP, LORA, NODES, source

NF4 = {**LORA, "quantization": "nf4"}


def exported(others: dict[str, Any] | None = None, task: str = "causal-lm", **knobs: Any) -> Export:
    return write(tool_named("msswift"), source(task=task, others=others, **knobs))


def keys(
    others: dict[str, Any] | None = None, task: str = "causal-lm", **knobs: Any
) -> dict[str, Any]:
    return dict(yaml.safe_load(exported(others, task, **knobs).files["msswift.yaml"]))


def departures(**knobs: Any) -> dict[str, bool]:
    return {each.knob: each.may_not_fit for each in exported(**knobs).departures}


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"precision": "fp32"}, ("float32", False, False, None)),
        ({"precision": "bf16"}, ("bfloat16", False, False, None)),
        ({"precision": "bf16-mixed"}, ("float32", True, False, None)),
        ({"precision": "fp16-mixed"}, ("float32", False, True, None)),
        (LORA, ("bfloat16", False, False, "bfloat16")),
        ({**LORA, "precision": "bf16-mixed"}, ("bfloat16", True, False, "float32")),
        ({**LORA, "precision": "fp32"}, ("float32", False, False, "float32")),
    ],
)
def test_precision(knobs: dict[str, Any], told: tuple[Any, ...]) -> None:
    given = keys(**knobs)
    assert tuple(given.get(name) for name in ("torch_dtype", "bf16", "fp16", "lora_dtype")) == told
    assert not departures(**knobs)


def test_what_is_off_is_no_key() -> None:
    """A null would reach its command line as the word None."""
    assert None not in keys().values()
    assert not {"quant_bits", "lorap_lr_ratio", "fsdp", "ENV"} & keys(**LORA).keys()
    assert keys(**LORA, lora_plus=16.0)["lorap_lr_ratio"] == 16.0
    told = keys(**NF4)
    assert (told["quant_method"], told["quant_bits"]) == ("bnb", 4)
    assert told["bnb_4bit_use_double_quant"] is False
    assert keys(**LORA, quantization="int8")["quant_bits"] == 8


def test_it_checkpoints_whole_blocks_without_reentering() -> None:
    told = keys(**CASES["full"])
    assert told["gradient_checkpointing"] is True
    assert told["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert keys()["gradient_checkpointing"] is False
    for value in ("alternate", "full:1"):
        assert departures(activation_checkpointing=value) == {"activation_checkpointing": False}
    assert departures(activation_offload="cpu") == {"activation_offload": True}


def test_ligers_kernels_and_loss_come_together() -> None:
    both = {"kernels": "liger", "loss": "fused"}
    assert keys(**both)["use_liger_kernel"] is True
    assert not departures(**both)
    assert departures(kernels="liger") == {"loss": False}
    assert departures(loss="chunked") == {"loss": True}


def test_several_devices_and_machines() -> None:
    """Processes are started by its environment, which the file holds."""
    told = keys(**CASES["fsdp"])
    assert told["ENV"] == {"NPROC_PER_NODE": 4}
    assert told["fsdp"]["fsdp"] == "full_shard auto_wrap offload"
    assert told["fsdp"]["fsdp_config"]["reshard_after_forward"] is True
    assert (
        keys(**{**FSDP, "reshard_after_forward": False})["fsdp"]["fsdp_config"][
            "reshard_after_forward"
        ]
        is False
    )
    assert keys(NODES, **CASES["ddp"])["ENV"] | {"NODE_RANK": 1} == {
        "NPROC_PER_NODE": 2,
        "NNODES": 2,
        "NODE_RANK": 1,
        "MASTER_ADDR": "FIRST_NODE",
    }
    assert departures(**HSDP, precision="bf16") == {"data_parallel_replicate": False}


def test_each_task_has_its_command() -> None:
    told = exported(task="dpo", **LORA)
    assert "swift rlhf msswift.yaml" in told.files["msswift.yaml"]
    assert keys(task="orpo", **LORA)["rlhf_type"] == "orpo"
    assert keys({"teacher": "one/teacher"}, task="distill")["teacher_model"] == "one/teacher"
    assert "swift sft msswift.yaml" in exported(task="rerank").files["msswift.yaml"]


def test_packing_wants_flash_attention() -> None:
    """As it refuses it itself."""
    packed = {"packing": True}
    assert keys(packed)["packing"] is False
    assert [each.knob for each in exported(packed).departures] == ["packing"]
    assert keys(packed, attention="flash")["packing"] is True
