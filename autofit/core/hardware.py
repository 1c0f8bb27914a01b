"""Hardware: the facts of a device and its host that techniques, estimates and reports rely on."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from autofit.core.environment import EXPANDABLE
from autofit.core.links import Link

GIB = 2**30
MIB = 2**20
CUDA_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, the error_code of a torch.AcceleratorError


@dataclass(frozen=True)
class Hardware:
    """One device and its host."""

    device: str  # "cuda" or "cpu"
    name: str
    memory_bytes: int
    host_memory_bytes: int
    host_free_bytes: int
    cores: int
    capability: tuple[int, int] | None = None
    context_bytes: int = 0  # of the open CUDA context; 0 on CPU
    devices: int = 1  # like this one, on each node, that a training uses
    nodes: int = 1
    link: str | None = None  # by its name in the catalogue, where it is not the card's usual one
    measured_link: Link | None = None  # between the devices of a node, where it was measured
    measured_on: str | None = None  # the card of the probes, where it is another (`--gpu NAME`)
    here: bool = True  # False where nothing is run: then this machine's lacks refuse no config
    used_bytes: int = 0  # device memory held by other processes; 0 on CPU
    dispatch_seconds: float | None = None  # of one small operator on the host; None: not measured
    host_link: float | None = None  # bytes a second between device and host; None: not measured
    allocator: str = ""  # PYTORCH_ALLOC_CONF; empty: as autofit sets it

    @property
    def world(self) -> int:
        """The number of devices of a training."""
        return self.devices * self.nodes

    @property
    def expandable_segments(self) -> bool:
        """Whether segments of device memory grow, instead of being reserved one by one."""
        return not self.allocator or EXPANDABLE in self.allocator

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts that the user should know."""
        if self.device == "cpu" or self.expandable_segments:
            return ()
        fact = f"segments of device memory do not grow here ({self.allocator})"
        return (f"{fact}, which takes some percent more of it.",)

    @property
    def title(self) -> str:
        """Its name, and how many train together."""
        title = self.name
        if self.world > 1:
            title = f"{self.devices} x {title}"
        if self.nodes > 1:
            title += f" on each of {self.nodes} nodes"
        return title

    def of_several(self, devices: int, nodes: int = 1, link: str | None = None) -> Self:
        """The same device as one of several."""
        return dataclasses.replace(self, devices=devices, nodes=nodes, link=link)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
