"""DeepSpeed: the stage that all knobs together need, and what is said in the first key."""

import json
from typing import Any

from autofit.export.shared_keys import ADAFACTOR_EPS
from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import DDP, LORA, TWO_SHARDS, ZERO_2, source


def exported(**knobs: Any) -> Export:
    return write(tool_named("deepspeed"), source(**knobs))


def keys(**knobs: Any) -> dict[str, Any]:
    return dict(json.loads(exported(**knobs).files["deepspeed.json"]))


def test_the_head_is_the_first_key() -> None:
    told = keys()
    assert next(iter(told)) == "_comment"
    assert "Measured on NVIDIA H200" in " ".join(told["_comment"])


def test_each_offload_has_the_stage_that_serves_it() -> None:
    assert keys()["zero_optimization"]["stage"] == 0
    optimizer = keys(optimizer_offload="cpu")["zero_optimization"]
    assert (optimizer["stage"], optimizer["offload_optimizer"]) == (
        2,
        {"device": "cpu", "pin_memory": True},
    )
    both = keys(**LORA, optimizer_offload="cpu", parameter_offload="cpu")["zero_optimization"]
    assert (both["stage"], both["offload_param"]["device"]) == (3, "cpu")


def test_gradients_are_collected_in_small_buckets_or_in_none() -> None:
    assert keys(precision="bf16")["zero_optimization"]["contiguous_gradients"] is False
    for knobs in (TWO_SHARDS, ZERO_2, {"optimizer_offload": "cpu"}):
        assert keys(**knobs)["zero_optimization"]["reduce_bucket_size"] == 20_000_000
    assert "reduce_bucket_size" not in keys()["zero_optimization"]
    ((fsdp,), (ddp,)) = (exported(**knobs).departures for knobs in (TWO_SHARDS, DDP))
    assert (fsdp.knob, fsdp.may_not_fit) == ("data_parallel", True)
    assert (ddp.knob, ddp.may_not_fit) == ("data_parallel", False)


def test_formats() -> None:
    mixed = keys(precision="bf16-mixed")
    assert mixed["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert mixed["bf16"]["enabled"] is False
    narrow = keys(precision="bf16")
    assert narrow["bf16"]["bf16_optimizer_states"] is True
    assert narrow["zero_optimization"]["stage"] == 1
    assert {each.knob for each in exported(precision="bf16").departures} == {"precision"}
    master = keys(precision="bf16", optimizer="adamw-master")
    assert master["bf16"] == {"enabled": True}  # DeepSpeed's own way: float32 copies of the weights
    assert master["optimizer"]["type"] == "AdamW"


def test_optimizers_it_cannot_name_are_said() -> None:
    assert keys(optimizer="adamw-foreach")["optimizer"]["params"]["torch_adam"] is True
    assert keys(optimizer="sgd")["optimizer"]["type"] == "SGD"
    adafactor = keys(optimizer="adafactor")["optimizer"]
    assert (adafactor["type"], adafactor["params"]["eps"]) == ("Adafactor", ADAFACTOR_EPS)
    (departure,) = exported(optimizer="adamw-8bit").departures
    assert departure.may_not_fit
