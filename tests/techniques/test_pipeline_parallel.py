"""pipeline_parallel: 1 unless told, divisors of the devices, and what cannot be in stages.

What it does to a run is in training/test_pipeline.py.
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

TRAITS = Traits(
    parameters=1,
    blocks=3,
    linears=1,
    attention=True,
    sdpa=True,
    batch_norm=False,
    dropout=False,
)


def test_what_it_is() -> None:
    assert canonicalize({"pipeline_parallel": 1}, WORKLOAD, CPU)["pipeline_parallel"] is None
    assert canonical()["pipeline_parallel"] == 1
    assert technique_named("pipeline_parallel").choices(EIGHT) == (1, 2, 4, 8)
    assert technique_named("pipeline_parallel").choices(CPU) == (None,)


@pytest.mark.parametrize(
    ("knobs", "data_parallel", "layout", "schedule"),
    [
        ({}, "fsdp", Layout(1, 4, 1, 1, 2), "1f1b"),
        ({"data_parallel": "ddp"}, "ddp", Layout(4, 1, 1, 1, 2), "1f1b"),
        ({"pipeline_schedule": "gpipe"}, "fsdp", Layout(1, 4, 1, 1, 2), "gpipe"),
        ({"pipeline_parallel": 8}, "none", Layout(1, 1, 1, 1, 8), "1f1b"),
    ],
)
def test_what_it_leaves_of_the_devices(
    knobs: dict[str, Any], data_parallel: str, layout: Layout, schedule: str
) -> None:
    config = canonical(**{"pipeline_parallel": 2} | knobs)
    assert (config["data_parallel"], Layout.of(config)) == (data_parallel, layout)
    assert config["pipeline_schedule"] == schedule
    assert layout.world == 8
    assert layout.dp_degree == 8 // layout.pipeline


@pytest.mark.parametrize(
    ("parameters", "devices", "choices"),
    [(70e9, 2, (1, 2)), (70e9, 4, (1, 2, 4)), (8e9, 2, (1,)), (70e9, 8, (1,))],
)
def test_stages_are_searched_of_what_one_device_does_not_hold(
    parameters: float, devices: int, choices: tuple[int, ...]
) -> None:
    cards = replace(EIGHT.of_several(devices), memory_bytes=24 * 2**30)
    workload = replace(WORKLOAD, traits=replace(TRAITS, parameters=int(parameters)))
    assert technique_named("pipeline_parallel").choices_for(workload, cards) == choices


def test_stages_that_do_not_divide_the_devices() -> None:
    with pytest.raises(InputError, match="does not divide"):
        canonical(pipeline_parallel=3)


@pytest.mark.parametrize(
    ("knobs", "traits", "reason"),
    [
        ({"pipeline_parallel": 4}, TRAITS, "the model has 3 repeated blocks, fewer than 4 stages"),
        ({}, replace(TRAITS, splits=False), "this loss cannot be split"),
        ({}, replace(TRAITS, batch_norm=True), "BatchNorm before the blocks would see"),
        ({"tensor_parallel": 2}, TRAITS, "not tried beside split layers or tokens"),
        ({"precision": "fp16-mixed"}, TRAITS, "use bf16-mixed"),
        ({"head_only": True}, TRAITS, "only the last stage has a head"),
    ],
)
def test_what_is_refused(knobs: dict[str, Any], traits: Traits, reason: str) -> None:
    config = canonical(**{"pipeline_parallel": 2} | knobs)
    found = refuse(Config(config), replace(WORKLOAD, traits=traits), EIGHT)
    assert found is not None
    assert reason in found
