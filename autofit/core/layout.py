"""Layout: how the devices of a training are divided among the ways of training in parallel.

replicate x shard x context x tensor = world, the number of all devices, each of which one process (a rank) trains on.
Ranks of different replicas or shards see different samples; ranks of one context group see the same samples and other
tokens, those of one tensor group the same samples and tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from autofit.core.config import Value
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware


@dataclass(frozen=True)
class Layout:
    """The degrees of a canonical Config; one device has 1 of each."""

    replicate: int = 1  # groups of devices that each hold all weights
    shard: int = 1  # devices among which one group divides its weights
    context: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Value]) -> Self:
        """The layout of a canonical config: what is null, or not there, is 1."""
        return cls(*(int(config.get(knob) or 1) for knob in _KNOBS))

    @property
    def world(self) -> int:
        """The number of devices."""
        return self.samplers * self.context * self.tensor

    @property
    def samplers(self) -> int:
        """The number of parts that each effective batch is divided into: of groups of ranks that see other samples."""
        return self.replicate * self.shard


def samplers(config: Mapping[str, Value], hardware: Hardware) -> int:
    """The number of parts of each effective batch, also of a config that is not canonical yet. Raises InputError where
    the degrees do not divide the devices."""
    alike = int(config.get("context_parallel") or 1) * int(config.get("tensor_parallel") or 1)
    if hardware.world % alike:
        message = f"context_parallel x tensor_parallel is {alike}, which does not divide {hardware.world} devices"
        raise InputError(f"{message}.", "Choose degrees that divide them.")
    return hardware.world // alike


def fitted_to(config: Mapping[str, Value], world: int, effective_batch: int) -> dict[str, Value]:
    """A config for another number of devices: what follows from that is left out, degrees that do not divide it are,
    and the micro-batch is the largest that divides a device's part and is no larger than it was."""
    found = dict(config)
    if Layout.of(config).world == world and (world > 1 or not found.get("data_parallel")):
        return found
    for knob in ("data_parallel_shard", "gradient_accumulation_steps"):
        found.pop(knob, None)
    for knob in _KNOBS if world > 1 else ("data_parallel", *_KNOBS, "reshard_after_forward", "fsdp_offload"):
        if world == 1 or world % int(found.get(knob) or 1) or found.get("data_parallel") != "fsdp":
            found.pop(knob, None)
    alike = int(found.get("context_parallel") or 1) * int(found.get("tensor_parallel") or 1)
    own, size = effective_batch * alike // world, found.get("micro_batch_size")
    if size is not None and own:
        found["micro_batch_size"] = max(each for each in range(1, min(int(size), own) + 1) if own % each == 0)
    return found


_KNOBS = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
