"""What a trace predicts and what real steps were seen to take, to hold one against the other."""

import functools
import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.step_trace import Trace
from autofit.estimate.trace import trace
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.training.build import build
from autofit.training.inspect import inspect_workload
from autofit.training.step import train_step
from tests.tiny import CPU, llama_workload

AMPERE = replace(CPU, device="cuda", name="a GPU", capability=(8, 0))
HOPPER = replace(AMPERE, capability=(9, 0))


def traced(workload: Workload, hardware: Hardware = CPU, **knobs: Any) -> Trace:
    return trace(workload, knobs, hardware)


def peak(trace: Trace) -> int:
    """The most bytes that lived at once."""
    sizes: dict[int, int] = {}
    live = highest = 0
    for event in trace.events:
        live += event.nbytes - sizes.get(event.storage, 0)
        sizes[event.storage] = event.nbytes
        highest = max(highest, live)
    return highest


def labelled(trace: Trace, label: str) -> int:
    """Bytes of all storages that were ever of that kind, at their largest."""
    largest: dict[int, int] = {}
    for event in trace.events:
        largest[event.storage] = max(event.nbytes, largest.get(event.storage, 0))
    return sum(nbytes for storage, nbytes in largest.items() if trace.labels.get(storage) == label)


def allocated(workload: Workload, knobs: Mapping[str, Any]) -> int:
    """The same by the allocator's own events, which tell what kernels hold inside, too."""
    record = AllocationRecord()
    with record:
        _two_steps(workload, knobs)
    return record.peak


def tracked(workload: Workload, knobs: Mapping[str, Any]) -> int:
    """The peak of two real steps of the whole batch."""
    gc.collect()
    with StorageTracker() as tracker:
        _two_steps(workload, knobs)
    return tracker.peak


def _two_steps(workload: Workload, knobs: Mapping[str, Any]) -> None:
    setup = build(workload, knobs, CPU)
    batch = workload.batch(workload.effective_batch_size)
    for _ in range(2):
        train_step(setup, batch)
    setup.close()


@functools.cache
def transformer() -> Workload:
    """Attention enough for what is known of compiled transformers to hold."""
    plain = llama_workload(
        4, 256, num_hidden_layers=3, hidden_size=64, vocab_size=64, max_position_embeddings=256
    )
    plain = replace(plain, traits=None)
    return replace(plain, traits=inspect_workload(plain, CPU, 2**33))
