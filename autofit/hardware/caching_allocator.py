"""A model of PyTorch's CUDA caching allocator: what it reserves for a list of allocations and frees, without a GPU.

A device must hold what the allocator reserves, not what tensors use: it takes memory of the driver in segments, caches
freed blocks and hands them out again. The rules are those of torch 2.11 to 2.13 with default settings but for
`expandable_segments`; each names the function of c10/cuda/CUDACachingAllocator.cpp it follows. The constants are in
c10/core/AllocatorConfig.h.

Left out: other streams, pools of CUDA graphs, the context, and memory that libraries take from the driver. Addresses
only grow here, where the driver picks them: they decide only between free blocks of equal size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIN_BLOCK = 512  # kMinBlockSize: every size is a multiple of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest allocation of the small pool
SMALL_SEGMENT = 2 << 20  # kSmallBuffer: a segment of the small pool; with expandable segments its page
LARGE_SEGMENT = 20 << 20  # kLargeBuffer, now the default of large_segment_size: likewise for the large pool
MIN_LARGE = 10 << 20  # kMinLargeAlloc: from here on a segment holds one allocation
ROUND_LARGE = 2 << 20  # kRoundLarge: and is a multiple of this

_UNBOUNDED = 1 << 60
_LARGE_POOL_BASE = LARGE_SEGMENT << 30  # apart from the small pool's addresses, and the start of a page

Event = tuple[int, int]  # (storage id, bytes): more than 0 bytes allocates, 0 frees


class DoesNotFitError(Exception):
    """No room under the limit, even with the cache released; whoever set the limit catches it."""

    def __init__(self, size: int, reserved: int, limit: int) -> None:
        super().__init__(f"{size} more bytes do not fit into {limit} bytes, of which {reserved} are reserved.")
        self.size, self.reserved, self.limit = size, reserved, limit


def round_size(nbytes: int) -> int:
    """Bytes of the block an allocation needs (`round_size`)."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def allocation_size(size: int) -> int:
    """Bytes the allocator asks the driver for when no free block holds `size` (`get_allocation_size`)."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class _Pool(ABC):
    """The free blocks of one pool (`BlockPool`), and how much memory of the driver it holds.

    Blocks are (size, address), sorted as `BlockComparatorSize` sorts them. Two blocks are neighbours when one ends
    where the other begins, so the addresses of segments that must not grow together never touch.
    """

    def __init__(self, base: int, least_remainder: int) -> None:
        self.reserved = 0
        self._base = base
        self._least_remainder = least_remainder
        self._free: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}  # address -> size, of free blocks
        self._start_of: dict[int, int] = {}  # end -> address, of free blocks
        self._unmapped: dict[int, int] = {}  # address -> size, of ranges without memory behind them

    def take(self, size: int) -> tuple[int, int] | None:
        """Address and size of the best fitting block, split where `should_split` does; None if none fits."""
        free = self._free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        block, start = free[index]
        if start + block in self._unmapped:
            # A block that can still grow counts as large as it can become (`get_free_block`, expandable_size).
            while index + 1 < len(free) and self._could_be(free[index + 1]) < self._could_be(free[index]):
                index += 1
            block, start = free[index]
        del free[index], self._size_at[start]
        remainder = block - size
        if remainder < self._least_remainder:
            del self._start_of[start + block]
            return start, block
        split = start + size
        insort(free, (remainder, split))
        self._size_at[split] = remainder
        self._start_of[start + block] = split
        return start, size

    def put(self, start: int, size: int) -> None:
        """Make a range free and one with its free neighbours (`try_merge_blocks`)."""
        end = start + size
        previous = self._start_of.pop(start, None)
        if previous is not None:
            del self._free[bisect_left(self._free, (self._size_at.pop(previous), previous))]
            start = previous
        following = self._size_at.pop(end, None)
        if following is not None:
            del self._free[bisect_left(self._free, (following, end))]
            end += following
        self._size_at[start] = end - start
        self._start_of[end] = start
        insort(self._free, (end - start, start))

    @abstractmethod
    def grow(self, size: int, allowed: int) -> bool:
        """Get memory from the driver until a free block holds `size`; False where that takes more than `allowed`."""

    @abstractmethod
    def release(self) -> None:
        """Return to the driver what it can take (`release_blocks`)."""

    def _could_be(self, block: tuple[int, int]) -> int:
        size, start = block
        return size + self._unmapped.get(start + size, 0)

    def _drop(self, start: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, start))]
        del self._size_at[start], self._start_of[start + size]


class _SegmentPool(_Pool):
    """Segments of fixed size, one cudaMalloc each."""

    def __init__(self, *, small: bool) -> None:
        # should_split: from kMinBlockSize on in the small pool, above kSmallSize in the large one.
        super().__init__(0 if small else _LARGE_POOL_BASE, MIN_BLOCK if small else SMALL_SIZE + MIN_BLOCK)
        self._segments: dict[int, int] = {}  # address -> size
        self._next = self._base

    def grow(self, size: int, allowed: int) -> bool:
        segment = allocation_size(size)
        if segment > allowed:
            return False
        self._segments[self._next] = segment
        self.put(self._next, segment)
        self._next += segment + MIN_BLOCK
        self.reserved += segment
        return True

    def release(self) -> None:
        for size, start in tuple(self._free):
            if self._segments.get(start) == size:  # a segment that is in use in part stays whole
                self._drop(start, size)
                del self._segments[start]
                self.reserved -= size


class _ExpandablePool(_Pool):
    """One range of virtual addresses that memory is mapped into page by page (Note [Expandable Segments])."""

    def __init__(self, *, small: bool) -> None:
        super().__init__(0 if small else _LARGE_POOL_BASE, MIN_BLOCK)
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._unmapped[self._base] = _UNBOUNDED

    def grow(self, size: int, allowed: int) -> bool:
        # alloc_block weighs the size of a segment against the limit, whatever the pages to be mapped.
        if allocation_size(size) > allowed:
            return False
        start = self._lowest_room(size)
        while (have := self._size_at.get(start, 0)) < size:
            hole = start + have
            mapped = -(-min(size - have, self._unmapped[hole]) // self._page) * self._page
            if mapped > allowed:
                return False
            if left := self._unmapped.pop(hole) - mapped:
                self._unmapped[hole + mapped] = left
            self.put(hole, mapped)
            self.reserved += mapped
            allowed -= mapped
        return True

    def release(self) -> None:
        for size, start in tuple(self._free):
            first, last = -(-start // self._page) * self._page, (start + size) // self._page * self._page
            if first < last:
                self._drop(start, size)
                self._unmap(first, last)
                if start < first:
                    self.put(start, first - start)
                if last < start + size:
                    self.put(last, start + size - last)

    def _lowest_room(self, size: int) -> int:
        """The lowest address where free and unmapped ranges in a row hold `size` (`find_expandable_block`)."""
        starts = (self._start_of.get(hole, hole) for hole in sorted(self._unmapped))
        return next(start for start in starts if self._has_room(start, size))

    def _has_room(self, start: int, size: int) -> bool:
        end = start
        while end - start < size:
            step = self._size_at.get(end) or self._unmapped.get(end)
            if step is None:
                return False
            end += step
        return True

    def _unmap(self, start: int, end: int) -> None:
        size = end - start + self._unmapped.pop(end, 0)
        hole = next((hole for hole, length in self._unmapped.items() if hole + length == start), start)
        self._unmapped[hole] = self._unmapped.get(hole, 0) + size
        self.reserved -= end - start


class CachingAllocator:
    """The allocator of one device and one stream.

    Args:
        expandable: as with PYTORCH_ALLOC_CONF=expandable_segments:True.
        limit: bytes it may reserve, as after torch.cuda.set_per_process_memory_fraction; None for no limit. A page that
            would pass the limit is refused, where PyTorch lets the last one exceed it by less than 20 MiB.

    Attributes:
        allocated: bytes of the blocks in use, as torch.cuda.memory_allocated counts them.
        retries: how often the cache had to be released (`num_alloc_retries`); each costs a synchronisation.
    """

    def __init__(self, *, expandable: bool, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.peak_allocated = self.peak_reserved = self.retries = 0
        kind = _ExpandablePool if expandable else _SegmentPool
        self._small: _Pool = kind(small=True)
        self._large: _Pool = kind(small=False)
        self._live: dict[int, tuple[_Pool, int, int]] = {}  # key -> pool, address, size

    @property
    def reserved(self) -> int:
        """Bytes held of the driver's memory, as torch.cuda.memory_reserved counts them."""
        return self._small.reserved + self._large.reserved

    def __contains__(self, key: int) -> bool:
        return key in self._live

    def allocate(self, key: int, nbytes: int) -> int:
        """The address of a block of at least `nbytes` under this key (`malloc`).

        A key that is in use is resized: the new block is there before the old one goes (resize_bytes_cuda).

        Raises:
            DoesNotFitError: the limit is reached and the cache has nothing to release.
        """
        assert nbytes > 0, "an empty storage has no block"
        size = round_size(nbytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        start, size = pool.take(size) or self._grow(pool, size)
        self.allocated += size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if key in self._live:
            self.free(key)
        self._live[key] = (pool, start, size)
        return start

    def free(self, key: int) -> None:
        """Put the block of this key into the cache (`free_block`)."""
        pool, start, size = self._live.pop(key)
        self.allocated -= size
        pool.put(start, size)

    def empty_cache(self) -> None:
        """Return whole free segments, or whole free pages, to the driver (`release_cached_blocks`)."""
        self._large.release()
        self._small.release()

    def _grow(self, pool: _Pool, size: int) -> tuple[int, int]:
        block = self._take_grown(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._take_grown(pool, size)
        if block is None:
            assert self.limit is not None, "without a limit the driver always gives"
            raise DoesNotFitError(size, self.reserved, self.limit)
        return block

    def _take_grown(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        grown = pool.grow(size, _UNBOUNDED if self.limit is None else self.limit - self.reserved)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return pool.take(size) if grown else None


@dataclass(frozen=True)
class Replay:
    """The result of a list of events: bytes at the peaks, and how often the cache had to be released."""

    peak_allocated: int
    peak_reserved: int
    retries: int


def replay(events: Iterable[Event], *, expandable: bool, limit: int | None = None) -> Replay:
    """Run the events in a fresh allocator. A free without an allocation does nothing: empty storages have no block.

    Raises:
        DoesNotFitError: an allocation does not fit under the limit.
    """
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    for storage, nbytes in events:
        if nbytes:
            allocator.allocate(storage, nbytes)
        elif storage in allocator:
            allocator.free(storage)
    return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.retries)
