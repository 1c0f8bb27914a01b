"""parameter_offload: frozen weights of the blocks rest in host memory and are streamed to the device when they run.

By hooks of our own, because what libraries offer was tried and does not serve here. accelerate's `cpu_offload` loads a
module's weights for its forward, and autograd holds on to what was loaded until the backward: in training nothing is
saved (and trained weights are left without gradients). FSDP2's `fully_shard` with `CPUOffloadPolicy` on one rank puts
DTensors in the place of a living model's parameters: bitsandbytes' int8 weights then fail in the forward, and NF4
weights lose their class, and with it their scales in the state dict. Quantised weights are the main use.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique
from autofit.setup.blocks import repeated_blocks
from autofit.setup.host_copies import CopyLane
from autofit.setup.state import Holder
from autofit.setup.streamed_blocks import LEAST_BLOCKS, SMALLEST, BlockStreamer, Slot

_TOO_FEW = (
    f"fewer than {LEAST_BLOCKS} repeated blocks have frozen weights of their own worth streaming, "
    "and two are always on the device; use none."
)


class ParameterOffload(Technique):
    """`cpu`: of the frozen weights of blocks, those of the running block and of the next one are on the device.

    Weights that are tied to something outside of their block stay on the device, as do adapters and the constants of
    quantisation. Pinned host memory is taken in powers of two for each weight. State dicts get the weights from there.
    """

    name = "parameter_offload"
    stage = Stage.ADAPT  # after LoRA has said what is frozen, before weights exist: building holds no more than a run
    off = "none"
    values = ("none", "cpu")

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (self.off,) if hardware.device == "cpu" else self.values

    def keeps_on_host(self, value: Value) -> bool:
        return value != self.off

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off:
            return None
        if hardware.device == "cpu":
            return "on a CPU, device and host are the same memory, so nothing would be saved; use none."
        if not config["lora_rank"]:
            return "weights that are trained cannot be streamed; set lora_rank, or use optimizer_offload."
        if workload.traits and workload.traits.blocks < LEAST_BLOCKS:
            return _TOO_FEW
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        stream_blocks(setup, CopyLane.of(setup.device), smallest=SMALLEST)

    def trace(self, setup: Setup, value: Value) -> None:
        stream_blocks(setup, CopyLane(None, setup.note_host), smallest=SMALLEST)


def stream_blocks(setup: Setup, lane: CopyLane, *, smallest: int) -> BlockStreamer:
    """Let every frozen weight of a block go to the host as soon as it exists.

    Raises:
        RefusedError: the model has too few blocks with weights of at least `smallest` bytes, as it is held in 4 bits.
    """
    compiled = setup.config.get("compile") not in (None, "none")
    streamer = BlockStreamer(setup.model, repeated_blocks(setup.model), lane, smallest=smallest, whole=compiled)
    if len({id(block) for block, slot in streamer.slots() if _elements(slot) >= 2 * smallest}) < LEAST_BLOCKS:
        streamer.close()
        raise RefusedError(_TOO_FEW)
    for block, (module, name) in streamer.slots():
        if name == "weight":
            hold = setup.holders.get(module)
            setup.holders[module] = functools.partial(_at_rest, streamer, (block, (module, name)), hold)
    setup.on_close(streamer.close)
    return streamer


def _at_rest(
    streamer: BlockStreamer, place: tuple[Any, Slot], hold: Holder | None, values: torch.Tensor
) -> nn.Parameter:
    """The weight as another technique holds it, else as it is; moved to the host before the next one is made."""
    block, slot = place
    parameter = hold(values) if hold else _as_it_is(slot, values)
    streamer.hold(block, slot, parameter)
    return parameter


def _as_it_is(slot: Slot, values: torch.Tensor) -> nn.Parameter:
    """A living model's own parameter, which others may hold too; else a new one."""
    module, name = slot
    own = module._parameters[name]
    if own is not None and own.device == values.device and own.untyped_storage() is values.untyped_storage():
        return own
    return nn.Parameter(values, requires_grad=False)


def _elements(slot: Slot) -> int:
    module, name = slot
    weight = module._parameters[name]
    return weight.numel() if weight is not None else 0
