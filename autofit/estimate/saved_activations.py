"""Saved tensors: when what autograd keeps for the backward could leave the device, and when it has to be back.

Noted in a trace where nothing leaves, so that both ways of a step can be told from the same trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autofit.estimate.recorder import Recorder
from autofit.setup.saved_tensors import SMALLEST, Movable


@dataclass
class Stay:
    """A saved storage, of any size: the sizes of a trace are not those of a run.

    Attributes:
        saved: after how many events of the trace it was saved last.
        left: after how many it was in autograd's hands alone, and a newer one, and not a tiny one, was saved. None:
            never, as of what bitsandbytes' int8 layers hold too.
        returns: after how many the backward asked for the one before it, and would fetch it ahead.
    """

    saved: int
    left: int | None = None
    returns: int | None = None


@dataclass(frozen=True)
class _Saved:
    number: int
    tensor: torch.Tensor


class SavedTensors:
    """Hooks that hold what they are given, and note when nobody else does.

    Attributes:
        stays: by the number of the storage, in the order in which each was saved last.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._recorder = recorder
        self._movable = Movable(model, smallest=0)
        # Of the storages that others still hold, by number: (address, how often it was saved).
        self._held: dict[int, tuple[int, int]] = {}
        self._newest: int | None = None
        self._asked: int | None = None  # events before the backward last asked
        self.stays: dict[int, Stay] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The context of one micro-batch's forward."""
        self._movable.look()
        self._recorder.before_each = self._look
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        number = next(self._recorder.storages_of(tensor), None) if tensor in self._movable else None
        if number is None:
            return tensor.detach() if tensor.requires_grad else tensor  # or an output would hold itself
        self._look()
        address, times = self._held.get(number, (tensor.untyped_storage()._cdata, 0))
        self._held[number] = address, times + 1
        self.stays.pop(number, None)
        self.stays[number] = Stay(len(self._recorder.events))
        if tensor.untyped_storage().nbytes() >= SMALLEST:
            self._newest = number
        return _Saved(number, tensor.detach())

    def _look(self) -> None:
        """Note which storages have come to be in autograd's hands alone: by the references that there are to them."""
        for number, (address, times) in list(self._held.items()):
            if not self._recorder.is_alive(number):
                del self._held[number]
            # One more is of the storage's own Python object, which the recorder asked for.
            elif number != self._newest and torch._C._storage_Use_Count(address) == times + 1:
                self.stays[number].left = len(self._recorder.events)
                del self._held[number]

    def _unpack(self, packed: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        stay, now = self.stays[packed.number], len(self._recorder.events)
        if stay.returns is None:
            stay.returns, self._asked = now if self._asked is None else self._asked, now
        return packed.tensor
