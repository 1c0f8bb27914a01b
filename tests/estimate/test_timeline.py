"""The memory of a step, moment by moment: its peak is that of the estimate, and it is as short as was asked."""

import dataclasses

import pytest

from autofit.core.estimate import KINDS
from autofit.core.hardware import GIB
from autofit.estimate.peak import peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.timeline import timeline, timeline_of
from autofit.estimate.trace import trace
from autofit.techniques import canonicalize
from tests import tiny

WORKLOAD = tiny.llama_workload(8)
CARD = dataclasses.replace(
    tiny.CPU, device="cuda", name="a card", capability=(8, 0), context_bytes=GIB // 2
)
CONFIGS = [
    {"precision": "fp32", "micro_batch_size": 8},
    {"precision": "bf16-mixed", "micro_batch_size": 2, "activation_checkpointing": "full"},
    {"precision": "bf16", "lora_rank": 4, "lora_targets": "all-linear", "micro_batch_size": 4},
]


@pytest.mark.parametrize("knobs", CONFIGS, ids=str)
@pytest.mark.parametrize("most", [20, 400])
def test_the_peak_is_that_of_the_estimate_however_few_moments_there_are(
    knobs: dict[str, object], most: int
) -> None:
    traced = trace(WORKLOAD, knobs, tiny.CPU)
    line = timeline_of(traced, tiny.CPU, most=most)
    peak = peak_of(traced, tiny.CPU)
    assert line.peak_bytes == peak.nbytes
    assert line.peak_phase == peak.phase == "backward"
    assert sum(line.moments[line.fullest]) == peak.nbytes
    assert len(line.moments) == len(line.at) == most
    assert all(len(moment) == len(KINDS) for moment in line.moments)
    assert list(line.at) == sorted(line.at)
    assert line.at[0] == 0.0
    assert line.at[-1] <= 1.0
    assert [name for name, _ in line.phases] == ["forward", "backward", "update"]
    assert line.micro_batches == 8 // int(str(knobs["micro_batch_size"]))


def test_what_lives_is_told_by_kind() -> None:
    line = timeline_of(trace(WORKLOAD, CONFIGS[0], tiny.CPU), tiny.CPU)
    by_kind = {kind: [moment[place] for moment in line.moments] for place, kind in enumerate(KINDS)}
    weights = by_kind["parameters"][0]
    assert set(by_kind["parameters"]) == {weights}
    assert 0.99 * weights <= max(by_kind["gradients"]) <= weights  # buffers have none
    assert 1.98 * weights <= by_kind["optimizer"][0] <= 2.1 * weights
    backward = dict(line.phases)["backward"]
    begun = next(place for place, at in enumerate(line.at) if at >= backward)
    assert by_kind["gradients"][0] == 0  # nothing accumulates
    assert by_kind["activations"][begun] > 4 * by_kind["activations"][-1]


def test_checkpointing_shows() -> None:
    plain, checkpointed = (
        timeline_of(
            trace(WORKLOAD, {"micro_batch_size": 8, "activation_checkpointing": each}, tiny.CPU),
            tiny.CPU,
        )
        for each in ("none", "full")
    )
    activations = KINDS.index("activations")
    held = [max(moment[activations] for moment in line.moments) for line in (plain, checkpointed)]
    assert held[1] < 0.7 * held[0]


def test_when_things_happen_is_in_time_where_the_speed_is_known() -> None:
    traced = trace(WORKLOAD, CONFIGS[0], tiny.CPU)
    timed, counted = timeline_of(traced, tiny.CPU, rates=UNKNOWN), timeline_of(traced, tiny.CPU)
    assert timed.timed
    assert not counted.timed
    # a backward is two forwards
    assert dict(timed.phases)["backward"] == pytest.approx(1 / 3, abs=0.1)
    assert timed.moments == counted.moments


def test_a_card_holds_the_libraries_workspace_too() -> None:
    config = canonicalize({"precision": "bf16", "micro_batch_size": 4}, WORKLOAD, CARD)
    line = timeline(WORKLOAD, CARD, UNKNOWN, config)
    assert line
    traced = trace(WORKLOAD, config, CARD)
    assert line.peak_bytes > peak_of(traced, CARD).nbytes
    assert sum(line.moments[line.fullest]) == line.peak_bytes
    assert line.config == config


def test_what_cannot_be_followed_is_left_out() -> None:
    refused = canonicalize({"precision": "tf32"}, WORKLOAD, tiny.CPU)
    assert timeline(WORKLOAD, tiny.CPU, UNKNOWN, refused) is None
