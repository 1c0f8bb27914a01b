"""What a run is put together from: whole lives of storages, workspaces that stay, gradients that wait for others."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.estimate.allocator_events import TwoSteps, reserved_for
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.peak import peak_of
from autofit.hardware.caching_allocator import reserved_by, round_size
from tests.estimate.traced import AMPERE, traced
from tests.tiny import llama_workload

WORKLOAD = replace(
    llama_workload(8, 64, num_hidden_layers=3, hidden_size=64, vocab_size=64), traits=None
)
CONFIGS: dict[str, dict[str, Any]] = {
    "at once": {"micro_batch_size": 8},
    "accumulated": {"micro_batch_size": 2},
    "in the backward": {"micro_batch_size": 8, "optimizer_in_backward": True},
    "checkpointed lora": {
        "micro_batch_size": 4,
        "lora_rank": 8,
        "activation_checkpointing": "full",
    },
    "offloaded": {"micro_batch_size": 4, "optimizer_offload": "cpu", "activation_offload": "cpu"},
}


@pytest.mark.parametrize("knobs", CONFIGS.values(), ids=CONFIGS)
def test_every_free_is_of_what_lives_and_the_peak_is_that_of_the_trace(
    knobs: dict[str, Any],
) -> None:
    found = traced(WORKLOAD, AMPERE, **knobs)
    alive: dict[int, int] = {}
    highest = 0
    for storage, nbytes in TwoSteps(found, AMPERE).events():
        if nbytes:
            alive[storage] = round_size(nbytes)
            highest = max(highest, sum(alive.values()))
        else:
            alive.pop(storage, None)
    lasting = {storage for storage in alive if storage >= 0}
    once = {
        storage
        for storage, label in found.labels.items()
        if label in ("parameters", "inputs", "optimizer")
    }
    assert lasting <= once | {event.storage for event in found.events[: found.marks[1].events]}
    peak = peak_of(found, AMPERE).nbytes + workspace_bytes(AMPERE)
    assert highest == pytest.approx(peak, rel=0.02)


def test_workspaces_come_with_the_first_products_and_stay() -> None:
    found = traced(WORKLOAD, AMPERE, micro_batch_size=2)
    events = list(TwoSteps(found, AMPERE).events())
    taken = [number for number, (storage, _) in enumerate(events) if storage < 0]
    assert [events[number][1] for number in taken] == [workspace_bytes(AMPERE) // 2] * 2
    before = sum(nbytes > 0 for _, nbytes in events[: taken[0]])
    assert before > found.marks[1].events // 2, "the weights are there already"
    assert taken[0] < taken[1] < len(events) / 2


def test_gradients_of_a_first_micro_batch_stay_until_the_update() -> None:
    """Of two micro-batches each gradient is made twice and freed once before the update: the second, when added."""
    at_once, accumulated = (traced(WORKLOAD, AMPERE, micro_batch_size=size) for size in (8, 2))
    weights = len(accumulated.trained)

    def kept(found: Any) -> int:
        """Storages of the size of a gradient that outlive a micro-batch in the first of the two steps."""
        events = [each for each in TwoSteps(found, AMPERE).events() if each[0] >= 0]
        state = next(
            i for i, (storage, _) in enumerate(events) if found.labels.get(storage) == "optimizer"
        )
        alive = {storage for storage, nbytes in events[:state] if nbytes}
        alive -= {storage for storage, nbytes in events[:state] if not nbytes}
        return len([storage for storage in alive if storage not in found.labels])

    assert kept(accumulated) >= weights
    assert kept(at_once) >= weights


def test_what_is_gathered_and_reduced_has_streams_of_its_own() -> None:
    hardware = AMPERE.of_several(2)
    found = traced(WORKLOAD, hardware, micro_batch_size=4, data_parallel="fsdp")
    made: dict[str, int] = dict.fromkeys(("gather", "reduce"), 0)
    for event in found.events:
        if stream := found.streams.get(event.storage):
            made[stream] += event.nbytes
    weights = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in found.shapes)
    assert made["reduce"] == pytest.approx(weights, rel=0.01), "gradients of this rank's half"
    assert 2 * weights <= made["gather"] <= 4.1 * weights, (
        "all weights in the forward, and most in the backward"
    )
    together = reserved_by(TwoSteps(found, hardware).events(), expandable=True)
    assert reserved_for(found, hardware, expandable=True) > together
    alone = traced(WORKLOAD, AMPERE, micro_batch_size=8)
    assert not alone.streams
