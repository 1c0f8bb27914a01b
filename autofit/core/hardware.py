"""Hardware: the facts of a device and its host that techniques, estimates and reports rely on."""

import dataclasses
from dataclasses import dataclass
from typing import Any

GIB = 2**30
MIB = 2**20
CUDA_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, the error_code of a torch.AcceleratorError


@dataclass(frozen=True)
class Hardware:
    """One device and its host. Sizes in bytes.

    `used_bytes` is what others hold on the device: not to be had, whatever its size; 0 on CPU.
    `context_bytes` is what the process pays for having the device open at all (the CUDA context); 0 on CPU.
    `measured_on` names the card that probes run on when it is not the one described (`--gpu NAME`). `here` is False
    where nothing is run: what this machine lacks is then not held against a config.
    """

    device: str  # "cuda" or "cpu"
    name: str
    memory_bytes: int
    host_memory_bytes: int
    host_free_bytes: int
    cores: int
    capability: tuple[int, int] | None = None
    context_bytes: int = 0
    ranks: int = 1
    measured_on: str | None = None
    here: bool = True
    used_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Hardware":
        capability = data.get("capability")
        return cls(**{**data, "capability": tuple(capability) if capability else None})
