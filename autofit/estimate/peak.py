"""Memory from a trace: the peak of live tensors, its breakdown, and what compiled code saves of
it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from autofit.core.config import Config
from autofit.core.estimate import KINDS, OF_SEVERAL, PARTS
from autofit.core.hardware import Hardware
from autofit.core.some_blocks import SomeBlocks, offloaded_of, offloads
from autofit.core.workload import Workload
from autofit.estimate.recorder import HOST, Event
from autofit.estimate.step_trace import Trace
from autofit.hardware.caching_allocator import round_size

# Compiled code without a rule: at least half of activations and temporaries; at most 15 % more of
# everything (a convolutional network on the CPU; language models needed up to 27 % less).
LEAST_COMPILED = 0.5
MOST_COMPILED = 1.15
# By activation_checkpointing, the share of a transformer's eager activations that Inductor's code
# recomputes: 0.17 to 0.30 without, 0.18 alternate, 0.05 selective, 0.00 full or where they are
# offloaded, 0.08 beside int8 layers. Of Llama, Qwen2, GPT-2 and BERT, by what PyTorch 2.11's CUDA
# allocator gave them when rehearsed without kernels.
_RECOMPUTED = {
    "none": 0.23,
    "alternate": 0.18,
    "selective": 0.05,
    "full": 0.0,
}
_RECOMPUTED_INT8 = 0.08
RECOMPUTED_UNCERTAINTY = 0.08  # of that share, either way


@dataclass(frozen=True)
class Peak:
    """The largest sum of live storages.

    Attributes:
        nbytes: of all of them.
        phase: of the step, in which it is.
        parts: bytes by KINDS.
    """

    nbytes: int
    phase: str
    parts: dict[str, int]


def in_blocks(nbytes: int, hardware: Hardware) -> int:
    """Bytes that the target's allocator takes for a tensor: whole blocks on CUDA."""
    if hardware.device == "cuda":
        return round_size(nbytes)
    return nbytes


def rounded(
    trace: Trace,
    hardware: Hardware,
    events: Iterable[Event] | None = None,
) -> Iterator[tuple[int, int]]:
    """The events as the target's allocator counts them: (storage, bytes), 0 bytes for what is on
    the host.

    Args:
        events: others than those of the step.
    """
    if events is None:
        events = trace.events

    for event in events:
        nbytes = event.nbytes
        if trace.labels.get(event.storage) == HOST:
            nbytes = 0

        yield event.storage, in_blocks(nbytes, hardware)


def peak_of(trace: Trace, hardware: Hardware) -> Peak:
    """The peak from building the model on, except in the extra step that only makes the optimizer's
    state."""
    trace = trace.whole or trace
    making_state = range(trace.start("state"), trace.start("forward"))
    highest = 0
    at = 0
    live = 0
    sizes: dict[int, int] = {}
    for number, (storage, nbytes) in enumerate(rounded(trace, hardware)):
        live += nbytes - sizes.get(storage, 0)
        sizes[storage] = nbytes
        if live > highest and number not in making_state:
            highest = live
            at = number

    return Peak(
        highest,
        trace.phase_at(at),
        _parts(trace, hardware, at),
    )


def peaks_between_steps(trace: Trace, hardware: Hardware) -> dict[str, int]:
    """The most bytes that live in an evaluation and in a saving, by their names, as far as they are
    known."""
    above = trace.of_whole(lambda followed: _above_rest(followed, hardware))
    resting = trace
    if trace.shallower is not None and trace.whole is not None:
        resting = trace.whole

    left = sum(dict(rounded(resting, hardware)).values())
    return {what: left + more for what, more in above.items()}


def _above_rest(trace: Trace, hardware: Hardware) -> dict[str, int]:
    """The most bytes that live in an evaluation and in a saving beyond those that a step leaves."""
    sizes = dict(rounded(trace, hardware))  # after the step
    most = {}
    for what, events in trace.between.items():
        live = 0
        highest = 0
        for storage, nbytes in rounded(trace, hardware, events):
            live += nbytes - sizes.get(storage, 0)
            sizes[storage] = nbytes
            highest = max(highest, live)

        most[what] = highest

    return most


def host_bytes_of(trace: Trace) -> int:
    """The most bytes of offloaded tensors that the host holds at once."""
    return trace.of_whole(lambda followed: {HOST: _most_on_host(followed)})[HOST]


def _most_on_host(trace: Trace) -> int:
    live: dict[int, int] = {}
    total = 0
    most = 0
    for event in trace.events:
        if trace.labels.get(event.storage) == HOST:
            total += event.nbytes - live.get(event.storage, 0)
            live[event.storage] = event.nbytes
            most = max(most, total)

    return most


def _parts(trace: Trace, hardware: Hardware, last: int) -> dict[str, int]:
    """What is live after an event: what a forward made is an activation, all else without a label
    is temporary."""
    live: dict[int, int] = {}
    made: dict[int, int] = {}
    for index, (storage, nbytes) in enumerate(islice(rounded(trace, hardware), last + 1)):
        made.setdefault(storage, index)
        live[storage] = nbytes

    parts = dict.fromkeys(KINDS, 0)
    for storage, nbytes in live.items():
        label = trace.labels.get(storage)
        if label not in parts:
            saved = label == "inputs" or trace.phase_at(made[storage]) == "forward"
            label = "activations" if saved else "temporary"

        parts[label] += nbytes

    # What several devices alone have is left out where it is nothing.
    shown = [kind for kind in PARTS if kind in parts and (parts[kind] or kind not in OF_SEVERAL)]
    return {kind: parts[kind] for kind in shown}


def recomputed_share(config: Config, workload: Workload, hardware: Hardware) -> float | None:
    """The share of its activations that a config's compiled code recomputes in the backward instead
    of saving.

    None where nothing is compiled, or where no rule is known.
    """
    traits = workload.traits
    if traits is None or not traits.attention:
        return None
    if config.compile == "none" or hardware.device != "cuda":
        return None

    share = _share_recomputed(config.activation_checkpointing, workload)
    if share is None:
        return None
    if offloads(config.activation_offload):
        blocks = max(traits.blocks, 1)
        share *= 1.0 - offloaded_of(config.activation_offload, blocks) / blocks
    if config.quantization == "int8":
        share = min(share, _RECOMPUTED_INT8)

    return share


def _share_recomputed(checkpointing: str, workload: Workload) -> float | None:
    """The share that compiled code recomputes under a value of activation_checkpointing."""
    some = SomeBlocks.of(checkpointing)
    if some is None or workload.traits is None:
        return _RECOMPUTED.get(checkpointing)

    # Between no block and all of them; of every second one it is known where nothing else is done.
    shares = {0.0: _RECOMPUTED[some.rest], 1.0: _RECOMPUTED[some.value]}
    if some.rest == "none":
        shares[0.5] = _RECOMPUTED["alternate"]

    number = some.number / workload.traits.blocks

    return float(np.interp(number, sorted(shares), [shares[at] for at in sorted(shares)]))
