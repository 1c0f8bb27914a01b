"""data_parallel: null on one device, ddp on several unless told, and what each refuses."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.workload import Traits
from autofit.techniques import canonicalize, refuse, technique_named
from tests import tiny

EIGHT = replace(tiny.CPU, devices=4, nodes=2)
WORKLOAD = tiny.llama_workload(16)


def canonical(**knobs: Any) -> Config:
    return canonicalize(knobs, WORKLOAD, EIGHT)


def test_one_device_has_none() -> None:
    config = canonicalize({}, WORKLOAD, tiny.CPU)
    of_several = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "reshard_after_forward",
        "fsdp_offload",
    )
    assert {config[knob] for knob in ("data_parallel", *of_several)} == {None}
    assert canonicalize({"data_parallel": "none"}, WORKLOAD, tiny.CPU) == config
    with pytest.raises(
        InputError, match="data_parallel fsdp trains on several devices, and there is one"
    ):
        canonicalize({"data_parallel": "fsdp"}, WORKLOAD, tiny.CPU)


def test_several_devices_hold_all_weights_unless_told() -> None:
    assert canonical()["data_parallel"] == "ddp"
    assert technique_named("data_parallel").choices(EIGHT) == ("fsdp", "ddp")
    assert technique_named("data_parallel").choices(tiny.CPU) == (None,)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"data_parallel": "none"}, "without it 8 devices would all do the same; use ddp or fsdp"),
        (
            {"data_parallel": "fsdp", "lora_rank": 4, "quantization": "int8"},
            "int8 weights lose their scales",
        ),
        (
            {"data_parallel": "fsdp", "optimizer": "adafactor"},
            "adafactor needs rows and columns of whole weights",
        ),
        (
            {"optimizer_offload": "cpu"},
            "copies gradients before ddp has averaged them; use fsdp with fsdp_offload",
        ),
        ({"optimizer_in_backward": True}, "updates in the backward come before ddp has averaged"),
    ],
)
def test_what_does_not_go_together_is_refused(knobs: dict[str, Any], reason: str) -> None:
    refusal = refuse(canonical(**knobs), WORKLOAD, EIGHT)
    assert refusal is not None
    assert reason in refusal


def test_a_loss_that_cannot_be_split_stays_on_one_device() -> None:
    traits = Traits(
        parameters=1,
        blocks=2,
        linears=2,
        attention=False,
        sdpa=True,
        batch_norm=False,
        dropout=False,
    )
    coupled = replace(WORKLOAD, traits=replace(traits, splits=False))
    for knobs in ({}, {"data_parallel": "fsdp"}):
        assert "each device would see a part" in str(
            refuse(canonicalize(knobs, coupled, EIGHT), coupled, EIGHT)
        )
    assert refuse(canonicalize({}, coupled, tiny.CPU), coupled, tiny.CPU) is None


def test_batch_norm_needs_weights_in_the_format_of_its_statistics() -> None:
    traits = Traits(
        parameters=1,
        blocks=2,
        linears=2,
        attention=False,
        sdpa=True,
        batch_norm=True,
        dropout=False,
    )
    images = replace(tiny.conv_workload(8), traits=traits)

    def refusal(**knobs: Any) -> str | None:
        return refuse(
            canonicalize({"data_parallel": "fsdp", **knobs}, images, EIGHT), images, EIGHT
        )

    assert "BatchNorm would get weights in 16 bits" in str(refusal(precision="bf16-mixed"))
    assert refusal(precision="bf16") is refusal(precision="bf16-mixed", data_parallel="ddp") is None


def test_a_batch_needs_a_sample_for_each_device() -> None:
    with pytest.raises(
        InputError, match="an effective batch of 4 cannot be divided among 8 devices"
    ):
        canonicalize({}, tiny.llama_workload(4), EIGHT)
    with pytest.raises(InputError, match="micro_batch_size 4 on each of 8 devices does not divide"):
        canonical(micro_batch_size=4)
