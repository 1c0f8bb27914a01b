"""A weight that rests in host memory, its gradient that does, and the block that they belong to.

What rests keeps its tensor on the device, whose storage is empty. `autofit.setup.streamed_blocks`
says what is where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.setup.host_copies import (
    CopyLane,
    HostArena,
    Layout,
    Ticket,
    flat_bytes,
    storage_key,
)

Slot = tuple[nn.Module, str]  # a module that holds a weight, and the weight's name there
Pair = tuple[torch.Tensor, torch.Tensor]  # target and source of a copy
BLOCK = 512  # bytes, of which CUDA's caching allocator gives whole numbers


class Block:
    """A block, the slots of its weights, those that rest on the host, and gradients that do.

    Attributes:
        awaited: slots whose weights are still to be made.
        changes: whether weights on the device may be newer than on the host.
        ticket: of the last copy that the block has to wait for.
    """

    def __init__(self, module: nn.Module, slots: list[Slot]) -> None:
        self.module = module
        self.slots = slots
        self.awaited: set[Slot] = set()
        self._packed: list[RestingMemory] = []
        self.resting: dict[Slot, RestingWeight] = {}
        self.gradients: dict[Slot, RestingGradient] = {}
        self.on_device = False
        self.gradients_on_device = False
        self.changes = False
        self.ticket: Ticket = None

    @property
    def memories(self) -> list[RestingMemory]:
        """The memory that its weights rest in, each once."""
        return list(dict.fromkeys(weight.memory for weight in self.resting.values()))

    def pack(self, arena: HostArena) -> None:
        """Put its weights into common memory, but for those whose memory other parameters share."""
        plain = [
            each for each in self.module.parameters() if not is_traceable_wrapper_subclass(each)
        ]
        shared = Counter(map(storage_key, plain))
        loose = [
            weight
            for weight in self.resting.values()
            if weight.memory not in self._packed
            and is_packable(weight.weight)
            and shared[storage_key(weight.weight)] <= 1
        ]
        self._packed += packed(loose, arena)


def is_packable(weight: torch.Tensor) -> bool:
    """Whether nobody keeps tensors of a weight's memory but who asks the weight for them: bitsandbytes
    does of int8 ones."""
    return weight.dtype is not torch.int8


class RestingMemory:
    """Memory of the device that is empty while what it holds rests on the host: of a weight, or of
    all weights of a block.

    Attributes:
        flat: all of it, as bytes.
        host: those bytes on the host.
    """

    def __init__(self, flat: torch.Tensor, host: torch.Tensor) -> None:
        self.flat = flat
        self.host = host
        self.storage = flat.untyped_storage()

    def filled(self) -> Pair:
        """Allocate it; returns (target, source) of the copy that fills it."""
        self.storage.resize_(self.host.numel())
        return self.flat, self.host

    def stored(self) -> Pair:
        """(target, source) of the copy that keeps what it holds on the device."""
        return self.host, self.flat

    def empty(self) -> None:
        """Free it."""
        self.storage.resize_(0)


class RestingWeight:
    """A weight in memory that rests on the host."""

    def __init__(self, weight: nn.Parameter, lane: CopyLane) -> None:
        flat = flat_bytes(weight)
        # The first buffer of a weight that is packed is only there until then.
        host = lane.host_buffer(flat.numel(), pinned=not is_packable(weight))
        host.copy_(flat)
        self.weight = weight
        self.memory = RestingMemory(flat, host)
        self.memory.empty()
        self._layout = Layout.of(weight)
        self._host = host
        self._own: torch.Tensor | None = None

    @property
    def own(self) -> torch.Tensor:
        """Its view of the host, always the same one, for an optimizer's state."""
        if self._own is None:
            self._own = self.host_view()
        return self._own

    def host_view(self) -> torch.Tensor:
        """The weight as a view of the host's bytes."""
        return self._layout.on(self._host)

    def move(self, memory: RestingMemory, start: int) -> None:
        """Become a part of larger memory, from this byte on."""
        part = memory.host[start : start + self._host.numel()]
        part.copy_(self._host)
        self._host = _as_whole(part)
        self.weight.data = self._layout.moved(start // self.weight.itemsize).on(memory.flat)
        self.memory = memory
        if self._own is not None:
            self._own.data = self.host_view()

    def leave(self) -> None:
        """Take memory of its own on the device, where it is now."""
        self.weight.data = self.weight.data.clone()


def _as_whole(part: torch.Tensor) -> torch.Tensor:
    """A part of a host's buffer as a tensor whose storage ends where it does, as files want it."""
    if isinstance(part, FakeTensor):
        return part
    return torch.from_numpy(part.numpy())


def packed(weights: Sequence[RestingWeight], arena: HostArena) -> list[RestingMemory]:
    """Empty memory that holds all of these weights, so that one copy moves many of them.

    Weights begin where the caching allocator would have begun them.
    """
    sizes = [-(-weight.memory.host.numel() // BLOCK) * BLOCK for weight in weights]
    memories = []
    first = 0
    while first < len(weights):
        # As many as the host's buffer has room for, or all.
        last = len(weights)
        while last > first + 1 and not arena.fits(sum(sizes[first:last])):
            last -= 1
        if not arena.fits(sum(sizes[first:last])):
            last = len(weights)  # in a new one

        end = sum(sizes[first:last])
        flat = torch.empty(end, dtype=torch.uint8, device=weights[first].weight.device)
        memory = RestingMemory(flat, arena.take(end, sum(sizes)))
        start = 0
        for weight, size in zip(weights[first:last], sizes[first:last], strict=True):
            weight.move(memory, start)
            start += size
        memory.empty()
        memories.append(memory)
        first = last
    return memories


class RestingGradient:
    """The gradient of a resting weight, which autograd makes anew in each step, and its bytes on
    the host."""

    def __init__(self, weight: nn.Parameter, lane: CopyLane) -> None:
        self._weight = weight
        self._host = lane.host_buffer(weight.numel() * weight.itemsize)
        self._newer = True  # than the host's, where it is on the device

    def made(self) -> None:
        """Note that autograd has made it, or added to it."""
        self._newer = True
        gradient = self._weight.grad
        assert gradient is not None, "autograd has just set it"

        if gradient.untyped_storage().nbytes() != self._host.numel():  # a part of something larger
            self._weight.grad = gradient.clone()

    def filled(self) -> Pair | None:
        """Allocate its storage, if it rests; returns (target, source) of the copy that fills it."""
        gradient = self._weight.grad
        if gradient is None or gradient.untyped_storage().nbytes():
            return None

        gradient.untyped_storage().resize_(self._host.numel())
        self._newer = False
        return flat_bytes(gradient), self._host

    def stored(self) -> Pair | None:
        """(target, source) of the copy that keeps what is newer on the device."""
        gradient = self._weight.grad
        if gradient is None or not self._newer or not gradient.untyped_storage().nbytes():
            return None

        self._newer = False
        return self._host, flat_bytes(gradient)

    def empty(self) -> None:
        """Free its storage."""
        if self._weight.grad is not None:
            self._weight.grad.untyped_storage().resize_(0)
        self._newer = True  # the next one that is not filled from the host

    def host_view(self) -> torch.Tensor | None:
        """The gradient as a view of the host's bytes; None where there is none."""
        gradient = self._weight.grad
        if gradient is None:
            return None
        return Layout.of(gradient).on(self._host)
