"""`estimate` on several devices: the other ways to divide a training, and which is the fastest."""

from typing import Any

import pytest

from autofit.api import what_if
from autofit.api.estimate import Prediction, estimate, predict
from autofit.api.other_layouts import other_layouts, which_wins
from autofit.core.layout import Layout
from tests import tiny

STAGES = {"pipeline_parallel": 2, "micro_batch_size": 1, "parameter_offload": "cpu", "lora_rank": 4}
FSDP = {"data_parallel": "fsdp"}
OFFLOADED = {"data_parallel": "fsdp", "fsdp_offload": "cpu"}
DDP = {"data_parallel": "ddp"}


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    workload = tiny.llama_workload(
        8, 64, num_hidden_layers=8, hidden_size=512, intermediate_size=1024
    )
    return predict(workload, None, gpu="rtx-4090", devices=2, set=STAGES)


def test_each_way_is_a_config_of_the_same_batch(prediction: Prediction) -> None:
    found = {tuple(way.items()): config for way, config in other_layouts(prediction)}
    assert list(found) == [tuple(way.items()) for way in (FSDP, OFFLOADED, DDP)]
    for config in found.values():
        layout = Layout.of(config)
        assert layout.world == 2
        assert config.lora_rank == 4
        assert config.micro_batch_size == 1
        assert config.gradient_accumulation_steps == 4  # two devices see other samples

    sharded, _, replicated = found.values()
    assert sharded.parameter_offload == "none"  # which FSDP does itself
    assert replicated.parameter_offload == "cpu"


def test_they_stand_beside_the_estimate(prediction: Prediction) -> None:
    answer = what_if.what_if(prediction)
    assert [each["knobs"] for each in answer["layouts"]] == [FSDP, OFFLOADED, DDP]
    told = answer["layouts"][0]
    full = estimate(
        prediction.workload,
        {**FSDP, "micro_batch_size": 1, "lora_rank": 4},
        gpu="rtx-4090",
        devices=2,
    )
    assert told["device_bytes"]["high"] == pytest.approx(full.high, rel=0.1)
    assert told["step_seconds"] == pytest.approx(
        full.step_seconds, rel=0.5
    )  # launches, in so small a model
    assert told["fits"] == full.verdict == "yes"
    assert answer["layouts_note"].startswith("Over PCIe 4.0 through the host, ")


def test_one_device_is_not_divided() -> None:
    alone = predict(tiny.llama_workload(), {}, gpu="rtx-4090")
    assert list(other_layouts(alone)) == []
    assert "layouts" not in what_if.what_if(alone)


def test_the_fastest_that_may_fit_wins_and_the_next_one_says_why(prediction: Prediction) -> None:
    def row(knobs: dict[str, str], fits: str, times: float) -> dict[str, Any]:
        seconds = times * (prediction.estimate.step_seconds or 0.0)
        return {"knobs": knobs, "fits": fits, "step_seconds": seconds}

    link = "Over PCIe 4.0 through the host, "
    rows = [row(FSDP, "yes", 1.5), row(OFFLOADED, "yes", 3.0), row(DDP, "no", 0.5)]
    assert which_wins(prediction, rows) == (
        f"{link}pipeline_parallel 2 is the fastest that may fit; data_parallel fsdp takes 1.50 "
        "times as long: it fetches all weights over that link for each micro-batch."
    )
    faster = which_wins(prediction, [row(DDP, "maybe", 0.5)])
    assert faster == (
        f"{link}data_parallel ddp is the fastest that may fit; pipeline_parallel 2 takes 2.00 "
        "times as long: its stages wait for one another."
    )
    alone = which_wins(prediction, [row(DDP, "no", 0.5)])
    assert alone == f"{link}pipeline_parallel 2 is the only one of these that may fit."
    assert which_wins(prediction, []) is None
