"""Saved tensors: when what autograd saves for the backward could leave the device, and when it has
to be back. Recorded in a trace where nothing leaves, so that one trace serves steps with and
without offloading."""

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

    Times are in events of the trace.
    """

    saved: int  # last
    # When autograd alone held it, and a newer one that is not tiny was saved; None: never, as where
    # bitsandbytes' int8 layers hold it too.
    left: int | None = None
    returns: int | None = (
        None  # when the backward asked for the one before it, and would prefetch it
    )


class SavedTensors:
    """Hooks that hold what autograd saves, and record when nobody else does: the `stays` by the
    number of the storage, in the order in which each was saved last."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._recorder = recorder
        self._movable = Movable(model, smallest=0)
        # Storages that others still hold, by number: (address, how often it was saved).
        self._held: dict[int, tuple[int, int]] = {}
        self._newest: int | None = None
        self._asked: int | None = None  # events before the backward's last request
        self.stays: dict[int, Stay] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The context of one micro-batch's forward."""
        self._movable.inspect()
        self._recorder.before_each = self._look
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[int, torch.Tensor]:
        number = next(self._recorder.storages_of(tensor), None) if tensor in self._movable else None
        if number is None:
            # or an output would hold itself
            return tensor.detach() if tensor.requires_grad else tensor

        self._look()
        address, times = self._held.get(
            number,
            (tensor.untyped_storage()._cdata, 0),
        )
        self._held[number] = address, times + 1
        self.stays.pop(number, None)
        self.stays[number] = Stay(len(self._recorder.events))
        if tensor.untyped_storage().nbytes() >= SMALLEST:
            self._newest = number

        return number, tensor.detach()

    def _look(self) -> None:
        """Record which storages autograd alone holds by now, from their reference counts."""
        for number, (address, times) in list(self._held.items()):
            if number not in self._recorder.living:
                del self._held[number]
            # One more reference is the storage's own Python object, which the recorder made.
            elif number != self._newest and torch._C._storage_Use_Count(address) == times + 1:
                self.stays[number].left = len(self._recorder.events)
                del self._held[number]

    def _unpack(self, packed: torch.Tensor | tuple[int, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed

        (number, tensor), now = packed, len(self._recorder.events)
        stay = self.stays[number]
        if stay.returns is None:
            stay.returns = now if self._asked is None else self._asked
            self._asked = now

        return tensor
