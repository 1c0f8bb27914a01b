"""tensor_parallel: 1 unless told, divisors of a node's devices, and what it leaves of the samples.

What it does to a run is in training/test_tensor_and_context_ranks.py.
"""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.layout import Layout
from autofit.core.workload import Traits
from autofit.techniques import canonicalize, refuse, technique_named
from tests.techniques.test_data_parallel import EIGHT, WORKLOAD, canonical
from tests.tiny import CPU


def test_what_it_is() -> None:
    assert canonicalize({"tensor_parallel": 1}, WORKLOAD, CPU)["tensor_parallel"] is None
    assert canonical()["tensor_parallel"] == 1
    assert technique_named("tensor_parallel").choices(EIGHT) == (1, 2, 4)
    assert technique_named("tensor_parallel").choices(CPU) == (None,)


def test_only_what_a_model_can_be_split_in_is_searched() -> None:
    traits = Traits(
        parameters=1,
        blocks=2,
        linears=1,
        attention=True,
        sdpa=True,
        batch_norm=False,
        dropout=False,
    )
    of_knob = technique_named("tensor_parallel").choices_for
    for heads, plan, choices in (
        (6, True, (1, 2)),
        (8, True, (1, 2, 4)),
        (8, False, (1,)),
        (0, True, (1, 2, 4)),
    ):
        workload = replace(WORKLOAD, traits=replace(traits, heads=heads, plan=plan))
        assert of_knob(workload, EIGHT) == choices
        assert of_knob(workload, CPU) == (None,)
    assert of_knob(WORKLOAD, EIGHT) == (1, 2, 4)


def test_what_it_cannot_be() -> None:
    with pytest.raises(
        InputError, match="tensor_parallel 8 does not divide the 4 devices of a node"
    ) as told:
        canonical(tensor_parallel=8)
    assert told.value.remedy == "Try 1, 2, 4."
    with pytest.raises(InputError, match="tensor_parallel is 2, which does not divide one device"):
        canonicalize({"tensor_parallel": 2}, WORKLOAD, CPU)


@pytest.mark.parametrize(
    ("knobs", "kind", "layout"),
    [
        ({}, "fsdp", Layout(1, 4, 1, 2)),
        ({"data_parallel_replicate": 2}, "fsdp", Layout(2, 2, 1, 2)),
        ({"context_parallel": 2, "reshard_after_forward": 2}, "fsdp", Layout(1, 2, 2, 2)),
    ],
)
def test_it_leaves_devices_for_samples(knobs: dict[str, Any], kind: str, layout: Layout) -> None:
    config = canonical(tensor_parallel=2, **knobs)
    assert (config["data_parallel"], Layout.of(config)) == (kind, layout)
    assert config["micro_batch_size"] == 16 // layout.dp_degree
    assert canonicalize(dict(config), WORKLOAD, EIGHT) == config
    assert refuse(config, WORKLOAD, EIGHT) is None


def alone(**knobs: Any) -> Config:
    return canonicalize(knobs, WORKLOAD, replace(EIGHT, nodes=1))


def test_one_group_of_all_devices_needs_no_data_parallel() -> None:
    config = alone(tensor_parallel=4)
    assert (config["data_parallel"], Layout.of(config)) == ("none", Layout(1, 1, 1, 4))
    assert (config["reshard_after_forward"], config["micro_batch_size"]) == (None, 16)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"lora_rank": 4}, "adapters of split layers drift apart between devices"),
        ({"optimizer": "adafactor"}, "adafactor was not tried on parts of layers; use adamw"),
        ({"optimizer_offload": "cpu"}, "use fsdp_offload instead"),
        ({"precision": "fp16-mixed"}, "use bf16-mixed"),
        (
            {"data_parallel": "ddp", "tensor_parallel": 2},
            "ddp was not tried beside tensor_parallel",
        ),
        ({"data_parallel": "none", "tensor_parallel": 2}, "devices would all do the same"),
    ],
)
def test_what_does_not_go_together_is_refused(knobs: dict[str, Any], reason: str) -> None:
    hardware = replace(EIGHT, nodes=1)
    assert reason in str(refuse(alone(**{"tensor_parallel": 4, **knobs}), WORKLOAD, hardware))
