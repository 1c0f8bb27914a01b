"""What a trace holds between steps: the figures that people work out on a napkin, for checking autofit against them."""

from statistics import median

from autofit.core.estimate import Resting
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.passes import rest_on_host
from autofit.estimate.peak import in_blocks, rounded
from autofit.estimate.trace import Trace


def resting_of(traced: Trace, workload: Workload, hardware: Hardware) -> Resting:
    """The bytes on one device between steps, and how many parameters are trained."""
    sizes: dict[int, int] = {}
    live, before_events, begins = 0, [0], traced.start("forward")  # live bytes before each event
    last: dict[int, int] = {}
    for number, (storage, nbytes) in enumerate(rounded(traced, hardware)):
        live += nbytes - last.get(storage, 0)
        last[storage] = nbytes
        if number < begins:
            sizes[storage] = nbytes
        before_events.append(live)

    def held(label: str) -> dict[int, int]:
        return {
            storage: size for storage, size in sizes.items() if traced.labels.get(storage) == label
        }

    weights, with_adapters = held("parameters"), bool(traced.config.lora_rank)
    adapters = sum(
        size for storage, size in weights.items() if with_adapters and storage in traced.trained
    )
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
    whole = workload.traits.parameters if workload.traits else None
    return Resting(
        weights=sum(weights.values()) - adapters,
        adapters=adapters,
        gradients=0 if elsewhere else sum(in_blocks(size, hardware) for size in gradients),
        optimizer=sum(held("optimizer").values()),
        trained=traced.parameters,
        parameters=whole if whole is None or not with_adapters else whole + traced.parameters,
        blocks=len(kept),
        activations=int(median(kept.values())) if kept else None,
    )
