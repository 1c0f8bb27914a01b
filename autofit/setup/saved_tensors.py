"""Saved tensors on the host: what autograd saves for the backward moves to host memory, and comes back in time.

Storages are moved, not tensors: q, k and v that are views of one product go together and once, whatever their strides;
so does an input that several layers save, or a mask that every layer saves.

The window bounds what stays on the device. In the forward the storages saved last stay until newer ones push them out:
each copy gets time to overlap, and the backward, which needs those first, finds them there. In the backward as many
bytes are prefetched, in the reverse order of saving.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from autofit.core.hardware import MIB
from autofit.setup.host_copies import CopyLane, HostPool, Layout, Ticket, flat_bytes, plain_tensors

# A step has as many norm statistics, masks and token ids as large tensors; each would cost the host the calls and
# events of two copies, and together they are a small part of the memory.
SMALLEST = MIB
# 10 ms of copying at 25 GB/s (of the 32 that PCIe 4.0 x16 has on paper): room for the copies of several large tensors
# to overlap with the operations between them.
WINDOW = 256 * MIB
_LOOK_AHEAD = 64  # storages; bounds the search for what comes next
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_CAST_OR_VIEW = (
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
)


class Movable:
    """Which saved tensors are worth moving: at least `smallest` bytes, and no weights."""

    def __init__(self, model: nn.Module, smallest: int = SMALLEST) -> None:
        self._model = model
        self._smallest = smallest
        self._weights: set[int] = set()

    def look(self) -> None:
        """Find the weights' storages again; weights may have moved."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._weights = {_key(inner) for tensor in tensors for inner in plain_tensors(tensor)}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
            return False
        nbytes = tensor.untyped_storage().nbytes()
        return (
            nbytes >= self._smallest
            and nbytes % tensor.itemsize == 0
            and not self._is_weight(tensor)
        )

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight, a view of one, or made of one alone, as autocast's copies in the low format.
        Autocast's cache holds those copies as long as the forward runs, so moving them would free nothing. What fsdp
        gathered of a weight is a parameter, too, whose memory is taken away and filled again behind autograd's back."""
        if _key(tensor) in self._weights or any(
            isinstance(each, nn.Parameter) for each in (tensor, tensor._base)
        ):
            return True
        node: Any = tensor.grad_fn
        while node is not None and node.name() in _CAST_OR_VIEW:
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)
        return isinstance(variable, nn.Parameter) or (
            variable is not None and _key(variable) in self._weights
        )


class SavedTensorsOnHost:
    """Saved-tensor hooks around a forward; unpacking works any time after, in any order, also several times."""

    def __init__(
        self, model: nn.Module, lane: CopyLane, *, smallest: int = SMALLEST, window: int = WINDOW
    ) -> None:
        self._lane = lane
        self._window = window
        self._movable = Movable(model, smallest)
        self.pool = HostPool(lane)
        self.packed_bytes = 0  # of all storages moved to the host so far
        self.fetched_bytes = (
            0  # of those copied back; the last ones in the window never leave the device
        )
        self._count = 0
        self._live: weakref.WeakValueDictionary[int, _Offloaded] = weakref.WeakValueDictionary()
        self._on_device: OrderedDict[int, int] = OrderedDict()  # number -> bytes in the window
        # address -> storage, its copy
        self._by_storage: dict[int, tuple[Any, weakref.ref[_Offloaded]]] = {}

    def hooks(self) -> saved_tensors_hooks:
        """The context of one micro-batch's forward; its backward may run outside."""
        self._movable.look()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[_Offloaded, Layout]:
        if (tensor.device.type == "cpu" and self._lane.pinned) or tensor not in self._movable:
            return tensor  # it may already be on the host
        storage = tensor.untyped_storage()
        offloaded = self._earlier_copy(storage, tensor._version)
        if offloaded is None:
            offloaded = self._offload(tensor.detach())
            key = storage._cdata  # a storage has one Python object as long as it lives
            by_storage = self._by_storage
            by_storage[key] = (
                weakref.ref(storage, lambda _: by_storage.pop(key, None)),
                weakref.ref(offloaded),
            )
        offloaded.users += 1
        return offloaded, Layout.of(tensor)

    def _earlier_copy(self, storage: torch.UntypedStorage, version: int) -> _Offloaded | None:
        """The storage's copy, if it was saved before and has not been written to since."""
        reference, copy = self._by_storage.get(storage._cdata, (None, None))
        offloaded = copy() if copy else None
        if (
            offloaded is None
            or reference is None
            or reference() is not storage
            or offloaded.version != version
        ):
            return None
        self._renumber(offloaded)  # the backward needs it first for whoever saved it last
        return offloaded

    def _offload(self, tensor: torch.Tensor) -> _Offloaded:
        flat = flat_bytes(tensor)
        offloaded = _Offloaded(self, tensor, flat, self.pool.take(flat.numel()))
        offloaded.ticket = self._lane.copy([(offloaded.host, flat)])
        self.packed_bytes += offloaded.nbytes
        self._renumber(offloaded)
        self._on_device[offloaded.number] = offloaded.nbytes
        while len(self._on_device) > 1 and sum(self._on_device.values()) > self._window:
            self._leave_device(next(iter(self._on_device)))
        return offloaded

    def _renumber(self, offloaded: _Offloaded) -> None:
        nbytes = self._on_device.pop(offloaded.number, None)
        self._live.pop(offloaded.number, None)
        self._count += 1
        offloaded.number = self._count
        self._live[offloaded.number] = offloaded
        if nbytes is not None:
            self._on_device[offloaded.number] = nbytes

    def _leave_device(self, number: int) -> None:
        self._on_device.pop(number, None)
        if (offloaded := self._live.get(number)) is not None:
            # or the memory would be reused while it is still being copied
            self._lane.wait(offloaded.ticket)
            offloaded.check()
            offloaded.original = offloaded.device = offloaded.ticket = None

    def _unpack(self, packed: torch.Tensor | tuple[_Offloaded, Layout]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        offloaded, layout = packed
        offloaded.check()
        if offloaded.spoiled:
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after the forward saved it"
            )
        flat = self._fetch(offloaded)
        self._lane.wait(offloaded.ticket)
        offloaded.ticket = None
        tensor = layout.on(flat)
        offloaded.unpacked += 1
        # every user has its tensor, which keeps the memory alive
        if offloaded.unpacked >= offloaded.users:
            offloaded.unpacked = 0
            offloaded.served = True
            self._leave_device(offloaded.number)
        self._prefetch(offloaded.number)
        return tensor

    def _fetch(self, offloaded: _Offloaded) -> torch.Tensor:
        if offloaded.device is None:
            offloaded.device = torch.empty(
                offloaded.nbytes, dtype=torch.uint8, device=offloaded.where
            )
            offloaded.ticket = self._lane.copy([(offloaded.device, offloaded.host)])
            self.fetched_bytes += offloaded.nbytes
            self._on_device[offloaded.number] = offloaded.nbytes
        return offloaded.device

    def _prefetch(self, number: int) -> None:
        """Fetch what was saved before, which the backward needs next."""
        room = self._window - sum(self._on_device.values())
        for earlier in range(number - 1, max(0, number - 1 - _LOOK_AHEAD), -1):
            offloaded = self._live.get(earlier)
            if offloaded is not None and not offloaded.served and offloaded.device is None:
                room -= offloaded.nbytes
                if room < 0 and self._on_device:
                    return
                self._fetch(offloaded)

    def _forget(self, offloaded: _Offloaded) -> None:
        """Free a storage whose graph is gone, with or without a backward."""
        if offloaded.device is not None:
            self._lane.wait(offloaded.ticket)
        self._on_device.pop(offloaded.number, None)
        self.pool.give(offloaded.buffer)


class _Offloaded:
    """One storage on the host, and on the device too while the window holds it."""

    def __init__(
        self,
        owner: SavedTensorsOnHost,
        original: torch.Tensor,
        flat: torch.Tensor,
        buffer: torch.Tensor,
    ) -> None:
        self.owner = owner
        self.buffer = buffer
        self.original: torch.Tensor | None = (
            original  # shows whether it changed while the copy may have run
        )
        self.version = original._version
        self.spoiled = False
        self.device: torch.Tensor | None = flat
        self.where = flat.device
        self.nbytes = flat.numel()
        self.host = buffer[: self.nbytes]
        self.ticket: Ticket = None
        self.number = self.users = self.unpacked = 0
        self.served = False

    def check(self) -> None:
        """Note a change in place; autograd compares versions only where there are no hooks."""
        self.spoiled |= self.original is not None and self.original._version != self.version

    def __del__(self) -> None:
        self.owner._forget(self)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
