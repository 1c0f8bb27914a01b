"""Saved tensors on the host: what autograd saves for the backward moves to host memory, and comes
back in time.

Storages are moved, not tensors: q, k and v that are views of one product go together and once,
whatever their strides; so does an input that several layers save, or a mask that every layer saves.

The window bounds what stays on the device. In the forward the storages saved last stay until newer
ones push them out: each copy gets time to overlap, and the backward, which needs those first, finds
them there. In the backward as many bytes are prefetched, in the reverse order of saving.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from autofit.core.hardware import MIB
from autofit.setup.host_copies import (
    CopyLane,
    HostPool,
    Layout,
    Ticket,
    flat_bytes,
    plain_tensors,
    storage_key,
)

# A step has as many norm statistics, masks and token ids as large tensors; each would cost the host
# the calls and events of two copies, and together they are a small part of the memory.
SMALLEST = MIB
# 10 ms of copying at 25 GB/s (of the 32 that PCIe 4.0 x16 has on paper): room for the copies of
# several large tensors to overlap with the operations between them.
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

    def inspect(self) -> None:
        """Find the weights' storages again; weights may have moved."""
        self._weights.clear()
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._weights.update(storage_key(plain) for plain in plain_tensors(tensor))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
            return False

        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._smallest or nbytes % tensor.itemsize:
            return False
        return not self._is_weight(tensor)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight, a view of one, or made of one alone, as autocast's copies in the
        low format are.

        Autocast's cache holds those copies as long as the forward runs, so moving them would free
        nothing. What fsdp gathered of a weight is a parameter, too, whose memory is freed and
        filled again without autograd's knowledge.
        """
        if storage_key(tensor) in self._weights:
            return True
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True

        node: Any = tensor.grad_fn
        while node is not None and node.name() in _CAST_OR_VIEW:
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)
        if variable is None:
            return False
        return isinstance(variable, nn.Parameter) or storage_key(variable) in self._weights


class SavedTensorsOnHost:
    """Saved-tensor hooks around a forward; unpacking works any time after, in any order, also
    several times.

    Args:
        smallest: bytes from which on a storage is moved.
        window: bytes that may stay on the device.
    """

    def __init__(
        self, model: nn.Module, lane: CopyLane, *, smallest: int = SMALLEST, window: int = WINDOW
    ) -> None:
        self._lane = lane
        self._window = window
        self._movable = Movable(model, smallest)
        self.pool = HostPool(lane)

        self.packed_bytes = 0  # of all storages moved to the host so far
        # of those copied back; the last ones in the window never leave the device
        self.fetched_bytes = 0

        self._inside: list[nn.Module] = []  # the only modules; none: everywhere
        self._moves = True  # whether what is saved now is moved
        self._count = 0
        self._live: weakref.WeakValueDictionary[int, _Offloaded] = weakref.WeakValueDictionary()
        self._on_device: OrderedDict[int, int] = OrderedDict()  # number -> bytes in the window
        # address -> storage, its copy
        self._by_storage: dict[int, tuple[Any, weakref.ref[_Offloaded]]] = {}

    def inside(self, block: nn.Module) -> list[RemovableHandle]:
        """Move what this module's forward saves, and nothing outside of such; returns its hooks."""
        self._inside.append(block)
        return [
            block.register_forward_pre_hook(self._enter),
            block.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, *_: Any) -> None:
        self._moves = True

    def _leave(self, *_: Any) -> None:
        self._moves = False

    def hooks(self) -> saved_tensors_hooks:
        """The context of one micro-batch's forward; its backward may run outside."""
        self._movable.inspect()
        self._moves = not self._inside
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[_Offloaded, Layout]:
        """What autograd saves instead of a tensor: itself, or where and how it lies on the host."""
        is_on_host = tensor.device.type == "cpu" and self._lane.pinned
        if not self._moves or is_on_host or tensor not in self._movable:
            return tensor

        storage = tensor.untyped_storage()
        offloaded = self._earlier_copy(storage, tensor._version)
        if offloaded is None:
            offloaded = self._offload(tensor.detach())
            self._remember(storage, offloaded)
        offloaded.users += 1
        return offloaded, Layout.of(tensor)

    def _remember(self, storage: torch.UntypedStorage, offloaded: _Offloaded) -> None:
        """Note a storage's copy as long as the storage lives, which is one Python object then."""
        key = storage._cdata

        by_storage = self._by_storage
        reference = weakref.ref(storage, lambda _: by_storage.pop(key, None))
        by_storage[key] = (reference, weakref.ref(offloaded))

    def _earlier_copy(self, storage: torch.UntypedStorage, version: int) -> _Offloaded | None:
        """The storage's copy, if it was saved before and has not been written to since."""
        reference, copy = self._by_storage.get(storage._cdata, (None, None))
        if reference is None or copy is None or reference() is not storage:
            return None

        offloaded = copy()
        if offloaded is None or offloaded.version != version:
            return None
        self._renumber(offloaded)  # the backward needs it first for whoever saved it last
        return offloaded

    def _offload(self, tensor: torch.Tensor) -> _Offloaded:
        """Start to copy a tensor's storage to the host, and push the oldest out of the window."""
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
        """Make a storage the one that was saved last."""
        nbytes = self._on_device.pop(offloaded.number, None)
        self._live.pop(offloaded.number, None)
        self._count += 1
        offloaded.number = self._count
        self._live[offloaded.number] = offloaded
        if nbytes is not None:
            self._on_device[offloaded.number] = nbytes

    def _leave_device(self, number: int) -> None:
        """Give up a storage's memory on the device, once it has been copied."""
        self._on_device.pop(number, None)
        offloaded = self._live.get(number)
        if offloaded is None:
            return

        # or the memory would be reused while it is still being copied
        self._lane.wait(offloaded.ticket)
        offloaded.check()
        offloaded.original = None
        offloaded.device = None
        offloaded.ticket = None

    def _unpack(self, packed: torch.Tensor | tuple[_Offloaded, Layout]) -> torch.Tensor:
        """The tensor that was packed, on the device; what was saved before it is prefetched."""
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

        # once every user has its tensor, that keeps the memory alive
        offloaded.unpacked += 1
        if offloaded.unpacked >= offloaded.users:
            offloaded.unpacked = 0
            offloaded.served = True
            self._leave_device(offloaded.number)
        self._prefetch(offloaded.number)
        return tensor

    def _fetch(self, offloaded: _Offloaded) -> torch.Tensor:
        """A storage's bytes on the device, where they may still be being copied."""
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
        free_bytes = self._window - sum(self._on_device.values())
        for earlier in range(number - 1, max(0, number - 1 - _LOOK_AHEAD), -1):
            offloaded = self._live.get(earlier)
            if offloaded is None or offloaded.served or offloaded.device is not None:
                continue

            free_bytes -= offloaded.nbytes
            if free_bytes < 0 and self._on_device:
                return
            self._fetch(offloaded)

    def _forget(self, offloaded: _Offloaded) -> None:
        """Free a storage whose graph is gone, with or without a backward."""
        if offloaded.device is not None:
            self._lane.wait(offloaded.ticket)
        self._on_device.pop(offloaded.number, None)
        self.pool.give(offloaded.buffer)


class _Offloaded:
    """One storage on the host, and on the device too while the window holds it.

    Attributes:
        version: of the tensor, as it was saved.
        spoiled: whether it was changed since.
        users: how many saved tensors lie in it.
        unpacked: how many of those the backward has asked for.
        served: whether it has asked for all.
    """

    def __init__(
        self,
        owner: SavedTensorsOnHost,
        original: torch.Tensor,
        flat: torch.Tensor,
        buffer: torch.Tensor,
    ) -> None:
        self.owner = owner
        self.buffer = buffer
        # shows whether it changed while the copy may have run
        self.original: torch.Tensor | None = original
        self.version = original._version
        self.spoiled = False

        self.device: torch.Tensor | None = flat
        self.where = flat.device
        self.nbytes = flat.numel()
        self.host = buffer[: self.nbytes]
        self.ticket: Ticket = None

        self.number = 0
        self.users = 0
        self.unpacked = 0
        self.served = False

    def check(self) -> None:
        """Note a change in place; autograd compares versions only where there are no hooks."""
        self.spoiled |= self.original is not None and self.original._version != self.version

    def __del__(self) -> None:
        self.owner._forget(self)
