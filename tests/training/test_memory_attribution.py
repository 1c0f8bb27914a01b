"""Who holds memory when it runs out: by kind and block, what was asked for, and what blocks keep of a forward."""

from typing import Any

import pytest
import torch

from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import OomSnapshot
from autofit.hardware.out_of_memory import asked_bytes
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.memory_attribution import MemoryAttribution
from autofit.training.step import accumulate, update
from tests import tiny

WORKLOAD = tiny.llama_workload(4)


def built(tracker: StorageTracker, **knobs: Any) -> tuple[Setup, MemoryAttribution]:
    with tracker:
        setup = build(WORKLOAD, {"micro_batch_size": 2, **knobs}, tiny.CPU)
    return setup, MemoryAttribution(setup, lambda: tracker.live)


def test_each_kind_is_counted_once_and_the_rest_is_told() -> None:
    tracker = StorageTracker()
    setup, attribution = built(tracker)
    batch = WORKLOAD.batch(4)
    with tracker, attribution.watching_forwards():
        accumulate(setup, batch)
        update(setup)
        accumulate(setup, batch)
    found = attribution.snapshot(MIB)
    weights = sum(parameter.nbytes for parameter in setup.model.parameters())
    buffers = sum(buffer.nbytes for buffer in setup.model.buffers())
    assert found.held["weights"] == weights + buffers
    assert found.held["gradients"] == weights
    assert 2 * weights <= found.held["optimizer"] < 2.1 * weights
    assert sum(found.held.values()) == tracker.live
    assert (found.phase, found.asked_bytes) == ("backward", MIB)
    assert len(found.largest) == 5
    # larger than that of embedding and head
    assert next(iter(found.largest)) == "optimizer of block 0"
    assert sorted(found.largest.values(), reverse=True) == list(found.largest.values())
    setup.close()


def test_what_blocks_keep_of_a_forward_is_named_while_it_runs() -> None:
    tracker = StorageTracker()
    setup, attribution = built(tracker, lora_rank=2, optimizer="sgd")
    seen: list[OomSnapshot] = []
    setup.model.get_submodule("lm_head").register_forward_pre_hook(
        lambda *_: seen.append(attribution.snapshot(None))
    )
    with tracker, attribution.watching_forwards():
        accumulate(setup, WORKLOAD.batch(4))
    first, *_ = seen
    assert first.phase == "forward"
    kept = {
        name: size
        for name, size in first.largest.items()
        if name.startswith("activations of block")
    }
    assert set(kept) == {"activations of block 0", "activations of block 1"}
    assert 0 < sum(kept.values()) <= first.held["others"]
    assert not any(
        block._forward_hooks
        for block in setup.model.modules()
        if "DecoderLayer" in type(block).__name__
    )
    setup.close()


def test_the_tracker_calls_once_where_a_level_is_passed() -> None:
    passed: list[int] = []
    tracker = StorageTracker()
    tracker.passed = 3000, passed.append
    with tracker:
        kept = [torch.zeros(250) for _ in range(5)]
    assert passed == [1000]
    assert len(kept) == 5


@pytest.mark.parametrize(
    ("message", "nbytes"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.5 GiB",
            int(2.5 * GIB),
        ),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes. Error code 12",
            1024,
        ),
        ("CUDA out of memory", None),
    ],
)
def test_the_allocation_that_failed_is_read_from_the_error(
    message: str, nbytes: int | None
) -> None:
    assert asked_bytes(torch.OutOfMemoryError(message)) == nbytes


def test_the_words() -> None:
    held = {"weights": 2 * GIB, "gradients": 0, "others": 3 * GIB}
    words = OomSnapshot("forward", GIB // 2, held, {"activations of block 3": GIB}).words
    assert words == (
        "Memory ran out in the forward, where 0.5 GiB more did not fit; held were, in GiB, weights 2, others 3. "
        "The largest: activations of block 3 1."
    )
