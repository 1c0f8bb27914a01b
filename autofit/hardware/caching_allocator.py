"""A model of PyTorch's CUDA caching allocator: what it reserves for a list of allocations and
frees, without a GPU.

A device must hold what the allocator reserves, not what tensors use: it takes memory of the driver
in segments, caches freed blocks and hands them out again. The rules are those of torch 2.11 to 2.13
with default settings but for `expandable_segments`; each names the function of
c10/cuda/CUDACachingAllocator.cpp it follows. The constants are in c10/core/AllocatorConfig.h.

Left out: pools of CUDA graphs, the context, memory that libraries take from the driver, and a full
device, where the cache is released. Addresses only grow here, where the driver picks them: they
decide only between free blocks of equal size.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial

MIN_BLOCK = 512  # kMinBlockSize: every size is a multiple of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest allocation of the small pool
# kSmallBuffer: a segment of the small pool; with expandable segments its page
SMALL_SEGMENT = 2 << 20
# kLargeBuffer, now the default of large_segment_size: likewise for the large pool
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20  # kMinLargeAlloc: from here on a segment holds one allocation
ROUND_LARGE = 2 << 20  # kRoundLarge: and is a multiple of this

# apart from the small pool's addresses, and the start of a page
_LARGE_POOL_BASE = LARGE_SEGMENT << 30

Event = tuple[int, int]  # (storage id, bytes): more than 0 bytes allocates, 0 frees


def round_size(nbytes: int) -> int:
    """Bytes of the block an allocation needs (`round_size`)."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


class _Pool:
    """The free blocks of one pool (`BlockPool`), and how much memory of the driver it holds.

    Blocks are (size, address), sorted as `BlockComparatorSize` sorts them. Two blocks are
    neighbours when one ends where the other begins, so the addresses of segments that must not grow
    together never touch.
    """

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.reserved = 0
        self._small = small
        self._expandable = expandable

        # should_split: from kMinBlockSize on in the small pool and in pages, above kSmallSize in
        # large segments.
        self._least_remainder = MIN_BLOCK
        if not small and not expandable:
            self._least_remainder += SMALL_SIZE

        self._end = 0 if small else _LARGE_POOL_BASE  # where memory of the driver is added
        self._free: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}  # address -> size, of free blocks
        self._start_of: dict[int, int] = {}  # end -> address, of free blocks

    def take(self, size: int) -> tuple[int, int] | None:
        """Address and size of the best fitting block, split where `should_split` does; None if none
        fits."""
        free = self._free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self._expandable and sum(free[index]) == self._end and index + 1 < len(free):
            # A block that can still grow counts as large as it can become (get_free_block,
            # expandable_size).
            index += 1

        block, start = free.pop(index)
        del self._size_at[start]
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

    def grow(self, size: int) -> None:
        """Get memory of the driver, so that a free block holds `size` (`get_allocation_size`)."""
        segment = SMALL_SEGMENT if self._small else LARGE_SEGMENT
        if self._expandable:  # pages after the last free block (Note [Expandable Segments])
            free = self._end - self._start_of.get(self._end, self._end)
            more = -(-(size - free) // segment) * segment
        elif size < MIN_LARGE:
            more = segment
        else:
            more = -(-size // ROUND_LARGE) * ROUND_LARGE

        self.put(self._end, more)
        self._end += more
        if not self._expandable:
            self._end += MIN_BLOCK
        self.reserved += more


class CachingAllocator:
    """The allocator of one device and one stream.

    Args:
        expandable: by PYTORCH_ALLOC_CONF=expandable_segments:True.
    """

    def __init__(self, *, expandable: bool) -> None:
        self._small = _Pool(small=True, expandable=expandable)
        self._large = _Pool(small=False, expandable=expandable)
        self._live: dict[int, tuple[_Pool, int, int]] = {}  # key -> pool, address, size

    @property
    def reserved(self) -> int:
        """Bytes held of the driver's memory, as torch.cuda.memory_reserved counts them; never fewer
        than before."""
        return self._small.reserved + self._large.reserved

    def __contains__(self, key: int) -> bool:
        return key in self._live

    def allocate(self, key: int, nbytes: int) -> int:
        """The address of a block of at least `nbytes` under this key (`malloc`).

        A key that is in use is resized: the new block is there before the old one goes
        (resize_bytes_cuda).
        """
        assert nbytes > 0, "an empty storage has no block"
        size = round_size(nbytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        block = pool.take(size)
        if block is None:
            pool.grow(size)
            block = pool.take(size)
            assert block is not None, "it has grown"

        if key in self._live:
            self.free(key)
        self._live[key] = (pool, *block)
        return block[0]

    def free(self, key: int) -> None:
        """Put the block of this key into the cache (`free_block`)."""
        pool, start, size = self._live.pop(key)
        pool.put(start, size)


def reserved_by(
    events: Iterable[Event], *, expandable: bool, streams: Mapping[int, str] | None = None
) -> int:
    """Bytes that a fresh allocator reserves for these events. A free without an allocation does
    nothing: empty storages have no block.

    Args:
        streams: those of storages that are not made in the usual one; a free block is only given to
            the stream that it was first made for (`get_free_block`).
    """
    fresh = partial(CachingAllocator, expandable=expandable)
    allocators: dict[str, CachingAllocator] = defaultdict(fresh)
    streams = streams or {}
    for storage, nbytes in events:
        allocator = allocators[streams.get(storage, "")]
        if nbytes:
            allocator.allocate(storage, nbytes)
        elif storage in allocator:
            allocator.free(storage)
    return sum(each.reserved for each in allocators.values())
