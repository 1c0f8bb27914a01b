"""A weight that rests in host memory, its gradient that does, and the block that they belong to.

What rests keeps its tensor on the device, whose storage is empty. `autofit.setup.streamed_blocks`
says what is where.
"""

from __future__ import annotations

import torch
from torch import nn

from autofit.setup.host_copies import CopyLane, Layout, Ticket, flat_bytes

Slot = tuple[nn.Module, str]  # a module that holds a weight, and the weight's name there
Pair = tuple[torch.Tensor, torch.Tensor]  # target and source of a copy


class Block:
    """A block, the slots of its weights, those that rest on the host, and gradients that do.

    Attributes:
        changes: whether weights on the device may be newer than on the host.
        ticket: of the last copy that the block has to wait for.
    """

    def __init__(self, module: nn.Module, slots: list[Slot]) -> None:
        self.module = module
        self.slots = slots
        self.resting: dict[Slot, RestingWeight] = {}
        self.gradients: dict[Slot, RestingGradient] = {}
        self.on_device = False
        self.gradients_on_device = False
        self.changes = False
        self.ticket: Ticket = None


class RestingWeight:
    """One weight: its storage on the device and its bytes on the host."""

    def __init__(self, weight: nn.Parameter, lane: CopyLane) -> None:
        self.weight = weight
        self.storage = weight.untyped_storage()
        self._flat = flat_bytes(weight)
        self.host = lane.host_buffer(self._flat.numel())
        self.host.copy_(self._flat)
        self.storage.resize_(0)
        self.own = self.host_view()  # always the same one, for an optimizer's state

    def filled(self) -> Pair:
        """Allocate its storage; returns (target, source) of the copy that fills it."""
        self.storage.resize_(self.host.numel())
        return self._flat, self.host

    def stored(self) -> Pair:
        """(target, source) of the copy that keeps what it holds on the device."""
        return self.host, self._flat

    def host_view(self) -> torch.Tensor:
        """The weight as a view of the host's bytes."""
        return Layout.of(self.weight).on(self.host)


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
