"""Peaks of tensor storage, byte for byte repeatable: the StorageTracker, and AllocationRecord for
compiled code.

Resident memory of the process is no substitute: allocators keep pages (errors of -16 % to +98 %
were measured against the tracked peak). The tracker serves real tensors and fake ones, so predicted
and measured mean the same.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Self
from unittest import mock

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


class BudgetExceededError(Exception):
    """Live storage passed the tracker's limit; whoever set the limit catches it."""


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all live storages that appear while the mode is active.

    A dispatch mode sees every operator, so every storage the moment it appears; a weak reference
    reports that it is freed. It misses what kernels allocate internally, and cannot watch
    torch.compile, which a dispatch mode prevents. A storage stays counted until it is freed, also
    after the mode is left.

    Attributes:
        limit: with more bytes alive BudgetExceededError is raised.
        live: bytes alive.
        peak: the most that were so far.
        passed: (bytes, a function): called once, with the bytes of the newest storage, when more
            than so many are alive.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.passed: tuple[int, Callable[[int], None]] | None = None
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._entered = 0
        self._resizes = ExitStack()
        self._of_fakes = False

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._entered += 1
        if self._entered == 1:
            fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            self._of_fakes = fake_mode is not None
            self._resizes.enter_context(self._watching_resizes())
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered -= 1
        if not self._entered:
            self._resizes.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def _watching_resizes(self) -> Iterator[None]:
        """Count storages that are emptied and filled again, which no operator does: FSDP2 gathers
        weights so."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = plain(storage, size)
            self._count(storage)
            return resized

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(wraps_tensors, types)):
            return NotImplemented  # it dispatches again, with its inner tensors
        result = func(*args, **(kwargs or {}))
        self.see(args)
        self.see(result)
        return result

    def reset_peak(self) -> None:
        """Forget the peak so far; what lives now stays counted."""
        self.peak = self.live

    def see(self, value: Any) -> None:
        """Count the storages of a tensor, or of those in a list or tuple."""
        if isinstance(value, list | tuple):
            for item in value:
                self.see(item)
            return
        if not isinstance(value, torch.Tensor):
            return

        if is_traceable_wrapper_subclass(
            value
        ):  # quantised weights: the inner tensors have the bytes
            inner: Any = value
            self.see([getattr(value, name) for name in inner.__tensor_flatten__()[0]])
        elif value.layout is torch.sparse_coo:  # the gradient of a sparse embedding
            self.see((value._indices(), value._values()))
        elif value.layout is torch.strided and not (value.is_meta or self._is_foreign(value)):
            self._count(value.untyped_storage())

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        """Whether it is a fake one among real ones: DTensors compute the shapes of results with
        them."""
        return not self._of_fakes and isinstance(tensor, FakeTensor)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        counted = self._sizes.get(key)
        if counted == size:
            return

        if counted is None:
            # A reference to the Python wrapper dies with the C++ storage: torch keeps the one
            # wrapper alive with it.
            self._references[key] = weakref.ref(storage, partial(self._freed, key))
        self._sizes[key] = size
        self.live += size - (counted or 0)
        if self.live <= self.peak:
            return

        self.peak = self.live
        if self.passed is not None and self.live > self.passed[0]:
            _, notify = self.passed
            self.passed = None
            notify(size)
        if self.limit is not None and self.live > self.limit:
            raise BudgetExceededError

    def _freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._references.pop(key, None)


@cache
def wraps_tensors(kind: type) -> bool:
    """Whether a class of tensors holds others: quantised weights, weights divided among ranks."""
    return hasattr(kind, "__tensor_flatten__")


class AllocationRecord:
    """The peak of CPU tensors allocated while the context is open, known when it is left: for steps
    that compile.

    It reads the CPU allocator's events from the profiler. On plain steps of linear layers its bytes
    are the tracker's; it also counts scratch memory of kernels (convolutions) and the random states
    that checkpointing keeps. Every operator costs some hundred bytes of the process until the end,
    so it is for a few steps, and it has no limit.

    Attributes:
        peak: without what was allocated before the context.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> Self:
        gc.collect()  # what is freed later would be taken from the peak
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        profiler = self._profile.profiler
        results = profiler.kineto_results if profiler else None
        events = list(results.experimental_event_tree()) if results else []
        totals: list[tuple[int, int, int]] = []  # (time, bytes live, bytes that changed)
        while events:
            event = events.pop()
            events.extend(event.children)
            fields = event.extra_fields
            if isinstance(fields, _ExtraFields_Allocation):
                totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        if not totals:
            return

        _, after, change = min(totals)
        before = after - change  # of an earlier record in this process, not freed yet
        self.peak = max(0, max(total for _, total, _ in totals) - before)
