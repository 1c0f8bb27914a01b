"""What a trace holds between steps: the figures that people work out on a napkin, for checking
autofit against them."""

from collections import Counter
from statistics import median

from autofit.core.estimate import Resting
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.passes import rest_on_host
from autofit.estimate.peak import in_blocks, rounded
from autofit.estimate.step_trace import Trace


def resting_of(traced: Trace, workload: Workload, hardware: Hardware) -> Resting:
    """The bytes on one device between steps, and how many parameters are trained."""
    held = traced.of_whole(lambda followed: _held(followed, hardware))
    activations = held.pop("activations", None)
    whole = workload.traits.parameters if workload.traits else None
    if whole is not None and traced.config.lora_rank:
        whole += held["trained"]

    return Resting(**held, parameters=whole, activations=activations)


def _held(traced: Trace, hardware: Hardware) -> dict[str, int]:
    """The fields of Resting that a trace tells; without blocks not their activations."""
    sizes: dict[int, int] = {}
    live = 0
    before_events = [0]  # live bytes before each event
    begins = traced.start("forward")
    last: dict[int, int] = {}
    for number, (storage, nbytes) in enumerate(rounded(traced, hardware)):
        live += nbytes - last.get(storage, 0)
        last[storage] = nbytes
        if number < begins:
            sizes[storage] = nbytes

        before_events.append(live)

    held: Counter[str | None] = Counter()
    adapters = 0
    for storage, size in sizes.items():
        label = traced.labels.get(storage)
        held[label] += size
        if label == "parameters" and traced.config.lora_rank and storage in traced.trained:
            adapters += size

    resting = rest_on_host(traced.config)  # those of blocks
    gradients = [
        shape.numel() * dtype.itemsize
        for shape, dtype, block in traced.shapes
        if not (resting and block is not None)
    ]
    elsewhere = traced.config.optimizer_in_backward or traced.config.fsdp_offload == "cpu"
    kept = {
        mark.block: before_events[after.events] - before_events[mark.events]
        for mark, after in traced.spans("forward")
        if mark.block is not None
    }

    figures = {
        "weights": held["parameters"] - adapters,
        "adapters": adapters,
        "gradients": 0 if elsewhere else sum(in_blocks(size, hardware) for size in gradients),
        "optimizer": held["optimizer"],
        "trained": traced.parameters,
        "blocks": len(kept),
    }

    if kept:
        figures["activations"] = int(median(kept.values()))

    return figures
