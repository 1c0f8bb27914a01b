"""Of many ways to divide devices, those that are predicted to be best are searched."""

import math
from collections.abc import Sequence

import pytest

from autofit.core.config import Config, Value
from autofit.core.options import search_options
from autofit.search.space import Space
from autofit.techniques import canonicalize
from autofit.tuning import layouts
from autofit.tuning.layouts import best_layouts, with_best_layouts
from autofit.tuning.space import space_for
from tests.estimate.traced import AMPERE
from tests.tiny import llama_workload

HARDWARE, WORKLOAD = AMPERE.of_several(4), llama_workload(8)
LORA = {"lora_rank": 8}


def config(**knobs: Value) -> Config:
    return canonicalize(knobs, WORKLOAD, HARDWARE)


def test_the_fastest_layouts_of_each_tier_that_fit_are_kept() -> None:
    ddp, fsdp = config(data_parallel="ddp"), config(data_parallel="fsdp")
    split = config(data_parallel="fsdp", tensor_parallel=2)
    adapters = config(data_parallel="ddp", **LORA)
    rows = [(ddp, 9.0, 1.0), (fsdp, 5.0, 2.0), (split, 6.0, 2.1), (adapters, 4.0, 1.0)]
    assert best_layouts(rows, 10.0) == [ddp, adapters]
    assert best_layouts(rows, 8.0) == [fsdp, split, adapters]
    assert best_layouts(rows, 3.0) == [fsdp, adapters]  # where none fits, what needs least
    assert best_layouts([], 3.0) == []


def test_no_more_than_a_few_layouts_are_kept() -> None:
    many = [config(data_parallel="fsdp", data_parallel_replicate=size) for size in (1, 2)]
    many += [config(data_parallel="ddp"), config(data_parallel="fsdp", reshard_after_forward=False)]
    assert best_layouts([(each, 1.0, 1.0 + place / 100) for place, each in enumerate(many)], 2.0) == many[:2]


@pytest.fixture
def everything() -> Space:
    return space_for(search_options(space="full", gpu_mem=24.0), WORKLOAD, HARDWARE)


def test_a_space_that_can_be_predicted_stays_whole(everything: Space) -> None:
    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        raise AssertionError("nothing is to be predicted for it")

    assert with_best_layouts(everything, WORKLOAD, AMPERE, math.inf, predict, seed=0) == (everything, None)


def test_a_large_space_keeps_its_best_layouts_and_all_other_values(
    everything: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MAX_CONFIGS", 10)
    asked: list[Config] = []

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        asked.extend(configs)
        slow = [1.0 if each["tensor_parallel"] == 2 else 2.0 for each in configs]
        return [1.0] * len(configs), [
            math.nan if each["data_parallel"] == "ddp" else seconds for each, seconds in zip(configs, slow, strict=True)
        ]

    space, note = with_best_layouts(everything, WORKLOAD, HARDWARE, 2.0, predict, seed=0)
    assert note is not None
    assert "tensor_parallel 2" in note
    assert space.knobs["tensor_parallel"] == (2,)
    assert "ddp" not in space.knobs["data_parallel"]
    for knob, values in everything.knobs.items():
        if knob not in (*layouts._LAYOUT, "fsdp_offload"):
            assert space.knobs[knob] == values
    assert "cpu" in everything.knobs["fsdp_offload"]
    assert "cpu" not in space.knobs["fsdp_offload"]  # as what is chosen fits
    assert {each["optimizer"] for each in asked} == {"adamw"}  # the usual one
    assert {each["tensor_parallel"] for each in asked} == {1, 2, 4}
