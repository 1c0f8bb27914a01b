"""Memory from a trace: the peak of live tensors, what it consists of, and what the device must give for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autofit.core.hardware import Hardware
from autofit.estimate.recorder import HOST
from autofit.estimate.trace import Trace

ROUNDING = 512  # bytes: CUDACachingAllocator.cpp, kMinBlockSize
_FORWARD, _STATE = "forward", "state"


@dataclass(frozen=True)
class Peak:
    """The largest sum of live storages, in bytes; `event` is the number of the event that reached it."""

    nbytes: int
    event: int
    phase: str
    parts: dict[str, int]


def in_blocks(nbytes: int, hardware: Hardware) -> int:
    """Bytes that the target's allocator takes for a tensor: whole blocks on CUDA."""
    return -(-nbytes // ROUNDING) * ROUNDING if hardware.device == "cuda" else nbytes


def rounded(trace: Trace, hardware: Hardware) -> Iterator[tuple[int, int]]:
    """The events as the target's allocator counts them: (storage, bytes); what is the host's as 0."""
    for event in trace.events:
        nbytes = 0 if trace.labels.get(event.storage) == HOST else event.nbytes
        yield event.storage, in_blocks(nbytes, hardware)


def peak_of(trace: Trace, hardware: Hardware) -> Peak:
    """The peak of a run from the making of the model on, but for the step that only makes the optimizer's state."""
    starts = {mark.phase: mark.events for mark in reversed(trace.marks)}
    making_state = range(starts[_STATE], starts[_FORWARD])
    sizes: dict[int, int] = {}
    live = highest = place = 0
    for number, (storage, nbytes) in enumerate(rounded(trace, hardware)):
        live += nbytes - sizes.get(storage, 0)
        sizes[storage] = nbytes
        if live > highest and number not in making_state:
            highest, place = live, number
    return Peak(highest, place, trace.phase_at(place), _parts(trace, hardware, place))


def _parts(trace: Trace, hardware: Hardware, place: int) -> dict[str, int]:
    """What lives at one moment. What a forward made and still lives is an activation, all else is temporary."""
    live: dict[int, int] = {}
    made: dict[int, int] = {}
    for number, (storage, nbytes) in enumerate(rounded(trace, hardware)):
        if number > place:
            break
        made.setdefault(storage, number)
        live[storage] = nbytes
    parts = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "temporary"), 0)
    for storage, nbytes in live.items():
        label = trace.labels.get(storage)
        if label not in parts:
            kept = label == "inputs" or trace.phase_at(made[storage]) == _FORWARD
            label = "activations" if kept else "temporary"
        parts[label] += nbytes
    return parts
