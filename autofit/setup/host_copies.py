"""Copies between a device and its host that overlap with computation, and the host buffers they
use.

One side stream serves both directions: a tensor is stored before it is fetched again, and a host
buffer can be reused while an older copy from it is still queued, without the host ever waiting for
the device.

Device memory at both ends of a copy belongs to the *computing* stream, which waits for a copy
before the memory is used or freed. The caching allocator may then reuse it at once, and the peak is
the same every time; with `record_stream` it would depend on when copies happen to end.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.hardware import CUDA_MEMORY_ALLOCATION

# What the computation waits for before it relies on a copy; None: already done.
Ticket = torch.cuda.Event | None


class CopyLane:
    """Copies in order, on a stream of their own.

    Args:
        stream: None copies at once (tests, fake tensors).
        note_host: called with every host buffer, which fake tensors do not show.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        note_host: Callable[[torch.Tensor], Any] = lambda buffer: None,
    ) -> None:
        self._stream = stream
        self._note_host = note_host
        self.pinned = stream is not None  # a copy from or to unpinned memory blocks the host

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """A lane beside the computation of a CUDA device."""
        return cls(torch.cuda.Stream(device))

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        """A flat buffer in host memory, pinned where copies need that, unless it is asked not to
        be."""
        pin = pinned and self.pinned
        with pinning():
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self._note_host(buffer)
        return buffer

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Ticket:
        """Start copies, given as (target, source), after all computation queued so far."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()  # type: ignore[no-any-return]

    def wait(self, ticket: Ticket) -> None:
        """Make computation queued from now on wait for a copy; the host does not block."""
        if ticket is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(ticket)

    def finish(self, ticket: Ticket) -> None:
        """Wait on the host for a copy, before that reads what was copied."""
        self.wait(ticket)
        if ticket is not None and self._stream is not None:
            ticket.synchronize()


@contextmanager
def pinning() -> Iterator[None]:
    """Wraps allocations of pinned memory: CUDA has one error for "host full" and "device full".

    Raises:
        MemoryError: where the host cannot pin more memory.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) != CUDA_MEMORY_ALLOCATION:
            raise
        raise MemoryError("the host has no more memory that can be pinned") from error


class HostArena:
    """Host buffers that stay, cut from larger ones: torch's allocator of pinned memory rounds each up
    to a power of two, which for matrices of a size just above one would take twice their bytes.
    """

    def __init__(self, lane: CopyLane) -> None:
        self._lane = lane
        self._rest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes can be taken without another large buffer, or none is ever made."""
        return not self._lane.pinned or nbytes <= self._rest.numel()

    def take(self, nbytes: int, whole: int) -> torch.Tensor:
        """A flat buffer of so many bytes, beside which others are expected: `whole` in all."""
        if not self._lane.pinned:
            return self._lane.host_buffer(nbytes)
        if nbytes > self._rest.numel():
            size = 1 << (2 * max(whole, nbytes) - 1).bit_length()
            self._rest = self._lane.host_buffer(size)
        buffer = self._rest[:nbytes]
        self._rest = self._rest[nbytes:]
        return buffer


class HostPool:
    """Host buffers, reused over micro-batches and steps.

    Sizes are rounded up to powers of two, as torch's allocator of pinned memory does: a buffer then
    serves other sizes too, and batches of varying length do not make the pool grow without end.
    """

    def __init__(self, lane: CopyLane) -> None:
        self._lane = lane
        self._free: dict[int, list[torch.Tensor]] = {}
        self.held_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A flat buffer of at least that many bytes."""
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()

        self.held_bytes += size
        return self._lane.host_buffer(size)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        self._free[buffer.numel()].append(buffer)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage as bytes; writing to them leaves the tensor's version counter
    alone."""
    length = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.data.as_strided((length,), (1,), 0).view(torch.uint8)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage, in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The layout of a tensor."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def moved(self, elements: int) -> Self:
        """The same so many elements later."""
        return replace(self, offset=self.offset + elements)

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout on the bytes of another storage."""
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a weight: itself, or those that a tensor subclass (quantised, divided
    among ranks) wraps.

    Stand-ins for quantised weights under fake tensors list theirs in `constants`.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            wrapped = getattr(tensor, name)
            if isinstance(wrapped, torch.Tensor):  # a DTensor names its mesh, too
                yield from plain_tensors(wrapped)
    else:
        yield tensor
        yield from getattr(tensor, "constants", ())


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for plain tensors that share their memory."""
    return int(tensor.untyped_storage()._cdata)
