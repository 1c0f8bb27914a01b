"""Saved tensors on the host: what autograd keeps for the backward waits in host memory, and comes back in time.

Storages are moved, not tensors: q, k and v that are views of one product go together and once, whatever their strides;
so does an input that several layers save, or a mask that every layer saves.

Bounded on both sides. In the forward the storages saved last stay on the device until newer ones push them out: that
gives each copy time to run beside the computation, and the backward, which needs those first, finds them there. In the
backward as many bytes are fetched ahead, in the reverse order of saving.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from autofit.core.hardware import MIB
from autofit.setup.host_copies import CopyLane, HostPool, Layout, Ticket, flat_bytes, plain_tensors

# Norms' statistics, masks and token numbers: a step has as many of them as of large tensors, each would cost the host
# the calls and events of two copies, and together they are a small part of the memory.
SMALLEST = MIB
# 10 ms of copying at 25 GB/s (of the 32 that PCIe 4.0 x16 has on paper): room for the copies of several large tensors
# to run beside the operations between them.
WINDOW = 256 * MIB
_LOOK_AHEAD = 64  # storages; a bound on the search for what comes next
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_CAST_OR_VIEW = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")


class Movable:
    """Which saved tensors are worth moving: of `smallest` bytes and more, and no weights."""

    def __init__(self, model: nn.Module, smallest: int = SMALLEST) -> None:
        self._model, self._smallest = model, smallest
        self._weights: set[int] = set()

    def look(self) -> None:
        """Look where the weights are, which may have moved since."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._weights = {_key(inner) for each in tensors for inner in plain_tensors(each)}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
            return False
        nbytes = tensor.untyped_storage().nbytes()
        return nbytes >= self._smallest and nbytes % tensor.itemsize == 0 and not self._is_weight(tensor)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """A weight, a view of one, or what is made of one alone, as autocast's copies in the low format.

        Those copies live in autocast's cache as long as the forward runs, so nothing would be freed then.
        """
        if _key(tensor) in self._weights:
            return True
        node: Any = tensor.grad_fn
        while node is not None and node.name() in _CAST_OR_VIEW:
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)
        return variable is not None and _key(variable) in self._weights


class SavedTensorsOnHost:
    """Saved-tensor hooks around a forward; unpacking works any time after, in any order, also several times.

    Attributes:
        packed_bytes: of the storages that were moved to the host so far.
        fetched_bytes: of those that were copied back; the window's last ones never leave the device.
        pool: the host buffers.
    """

    def __init__(self, model: nn.Module, lane: CopyLane, *, smallest: int = SMALLEST, window: int = WINDOW) -> None:
        self._lane, self._window = lane, window
        self._movable = Movable(model, smallest)
        self.pool = HostPool(lane)
        self.packed_bytes = 0
        self.fetched_bytes = 0
        self._count = 0
        self._live: weakref.WeakValueDictionary[int, _Parked] = weakref.WeakValueDictionary()
        self._on_device: OrderedDict[int, int] = OrderedDict()  # number -> bytes that the window holds there
        self._known: dict[int, tuple[Any, weakref.ref[_Parked]]] = {}  # storage -> itself, where it is

    def hooks(self) -> saved_tensors_hooks:
        """The context of one micro-batch's forward; its backward may run outside."""
        self._movable.look()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        if (tensor.device.type == "cpu" and self._lane.pinned) or tensor not in self._movable:
            return tensor  # which may already be where it would go
        storage = tensor.untyped_storage()
        parked = self._parked_before(storage, tensor._version)
        if parked is None:
            parked = self._park(tensor.detach())
            self._remember(storage, parked)
        parked.users += 1
        return _Packed(parked, Layout.of(tensor))

    def _parked_before(self, storage: torch.UntypedStorage, version: int) -> _Parked | None:
        """The storage's copy, if it was saved before and has not been written to since."""
        reference, place = self._known.get(storage._cdata, (None, None))
        parked = place() if place else None
        if parked is None or reference is None or reference() is not storage or parked.version != version:
            return None
        self._renumber(parked)  # the backward wants it when it comes to the one who saved it last
        return parked

    def _remember(self, storage: torch.UntypedStorage, parked: _Parked) -> None:
        key, known = storage._cdata, self._known  # torch keeps one Python object for a storage as long as it lives
        self._known[key] = (weakref.ref(storage, lambda _: known.pop(key, None)), weakref.ref(parked))

    def _park(self, tensor: torch.Tensor) -> _Parked:
        flat = flat_bytes(tensor)
        parked = _Parked(self, tensor, flat, self.pool.take(flat.numel()))
        parked.ticket = self._lane.copy([(parked.host, flat)])
        self.packed_bytes += parked.nbytes
        self._renumber(parked)
        self._on_device[parked.number] = parked.nbytes
        while len(self._on_device) > 1 and sum(self._on_device.values()) > self._window:
            self._leave_device(next(iter(self._on_device)))
        return parked

    def _renumber(self, parked: _Parked) -> None:
        nbytes = self._on_device.pop(parked.number, None)
        self._live.pop(parked.number, None)
        self._count += 1
        parked.number = self._count
        self._live[parked.number] = parked
        if nbytes is not None:
            self._on_device[parked.number] = nbytes

    def _leave_device(self, number: int) -> None:
        self._on_device.pop(number, None)
        parked = self._live.get(number)
        if parked is not None:
            self._lane.wait(parked.ticket)  # or the memory would be written to while it is still being copied
            parked.check()
            parked.original = parked.device = parked.ticket = None

    def _unpack(self, packed: torch.Tensor | _Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        parked = packed.parked
        parked.check()
        if parked.spoiled:
            raise RuntimeError("a tensor that the backward needs was changed in place after the forward saved it")
        flat = self._fetch(parked)
        self._lane.wait(parked.ticket)
        parked.ticket = None
        tensor = packed.layout.on(flat)
        parked.unpacked += 1
        if parked.unpacked >= parked.users:  # all have theirs, which keep the memory as long as they need it
            parked.unpacked, parked.served = 0, True
            self._leave_device(parked.number)
        self._fetch_ahead(parked.number)
        return tensor

    def _fetch(self, parked: _Parked) -> torch.Tensor:
        if parked.device is None:
            parked.device = torch.empty(parked.nbytes, dtype=torch.uint8, device=parked.where)
            parked.ticket = self._lane.copy([(parked.device, parked.host)])
            self.fetched_bytes += parked.nbytes
            self._on_device[parked.number] = parked.nbytes
        return parked.device

    def _fetch_ahead(self, number: int) -> None:
        """Fetch what was saved before, which the backward will ask for next."""
        room = self._window - sum(self._on_device.values())
        for earlier in range(number - 1, max(0, number - 1 - _LOOK_AHEAD), -1):
            parked = self._live.get(earlier)
            if parked is None or parked.served or parked.device is not None:
                continue
            room -= parked.nbytes
            if room < 0 and self._on_device:
                return
            self._fetch(parked)

    def _forget(self, parked: _Parked) -> None:
        """Nobody can ask for it any more: its graph is gone, with or without a backward."""
        if parked.device is not None:
            self._lane.wait(parked.ticket)
        self._on_device.pop(parked.number, None)
        self.pool.give(parked.buffer)


class _Parked:
    """One storage on the host, and on the device too as long as the window holds it there."""

    def __init__(
        self, owner: SavedTensorsOnHost, original: torch.Tensor, flat: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        self.owner, self.buffer = owner, buffer
        self.original: torch.Tensor | None = original  # to tell whether it was changed while the copy may have run
        self.version = original._version
        self.spoiled = False
        self.device: torch.Tensor | None = flat
        self.where, self.nbytes = flat.device, flat.numel()
        self.host = buffer[: self.nbytes]
        self.ticket: Ticket = None
        self.number = 0
        self.users = 0
        self.unpacked = 0
        self.served = False

    def check(self) -> None:
        """Autograd compares versions by itself only where no hooks are."""
        self.spoiled |= self.original is not None and self.original._version != self.version

    def __del__(self) -> None:
        self.owner._forget(self)


@dataclass(frozen=True)
class _Packed:
    """What autograd holds instead of a saved tensor."""

    parked: _Parked
    layout: Layout


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
