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
    link: str | None = None  # by its name in the catalogue, where it is another than such a card usually has
    measured_link: Link | None = None  # between the devices of a node, where it was measured
    measured_on: str | None = None  # the card that probes run on where it is not the one described (`--gpu NAME`)
    here: bool = True  # False where nothing is run: what this machine lacks is then not held against a config
    used_bytes: int = 0  # device memory held by other processes; 0 on CPU
    dispatch_seconds: float | None = None  # of one small operator on the host's processor; None: not measured
    host_link: float | None = None  # bytes per second between the device and its host; None: not measured
    allocator: str = ""  # the settings of PyTorch's CUDA allocator, as PYTORCH_ALLOC_CONF; empty: as autofit sets them

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
        return (f"segments of device memory do not grow here ({self.allocator}), which takes some percent more of it.",)

    @property
    def title(self) -> str:
        """Its name, and how many train together."""
        several = f"{self.devices} x {self.name}" if self.world > 1 else self.name
        return f"{several} on each of {self.nodes} nodes" if self.nodes > 1 else several

    def of_several(self, devices: int, nodes: int = 1, link: str | None = None) -> Self:
        """The same device as one of several."""
        return dataclasses.replace(self, devices=devices, nodes=nodes, link=link)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
