"""The model of the caching allocator: each rule by a case worked out by hand, and what holds for any list of events."""

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.hardware.caching_allocator import (
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    CachingAllocator,
    Event,
    reserved_by,
    round_size,
)

MIB = 1 << 20
Action = tuple[str, int]
EXPANDABLE = pytest.mark.parametrize("expandable", [False, True])

# Sizes at which a rule changes, and any in between.
SIZES = st.one_of(
    st.sampled_from(
        [
            1,
            512,
            513,
            MIB,
            MIB + 1,
            2 * MIB,
            10 * MIB - 1,
            10 * MIB,
            11 * MIB,
            20 * MIB,
            20 * MIB + 1,
        ]
    ),
    st.integers(1, 4096),
    st.integers(1, 50 * MIB),
)
# An allocation and its bytes, or a free and which of the live blocks.
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES), st.tuples(st.just("free"), st.integers(0, 50))
    ),
    min_size=20,  # shorter lists rarely fill a segment; the cases by hand are short
    max_size=80,
)


def allocated(expandable: bool, *mib: int) -> tuple[CachingAllocator, int]:
    """An allocator with one block of each size under the keys 0, 1, ... side by side, and the address of the first."""
    allocator = CachingAllocator(expandable=expandable)
    addresses = [allocator.allocate(key, size * MIB) for key, size in enumerate(mib)]
    assert addresses == [addresses[0] + sum(mib[:key]) * MIB for key in range(len(mib))]
    return allocator, addresses[0]


def drive(
    allocator: CachingAllocator, actions: Sequence[Action], first_key: int = 0
) -> dict[int, tuple[int, int]]:
    """Run the actions and check after each one what always holds; key -> (address, bytes) of what lives at the end."""
    live: dict[int, tuple[int, int]] = {}
    for key, (action, number) in enumerate(actions, first_key):
        if action == "allocate":
            live[key] = (allocator.allocate(key, number), number)
        elif live:
            freed = list(live)[number % len(live)]
            allocator.free(freed)
            del live[freed]
        check(allocator, live)
    return live


def check(allocator: CachingAllocator, live: dict[int, tuple[int, int]]) -> None:
    ranges = sorted((address, address + round_size(nbytes)) for address, nbytes in live.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges)), (
        "blocks overlap"
    )
    assert all(address % 512 == 0 for address, _ in ranges)
    assert sum(end - start for start, end in ranges) <= allocator.reserved


@pytest.mark.parametrize(
    ("nbytes", "block", "segment", "pages"),
    [
        (1, 512, 2 * MIB, 2 * MIB),
        (513, 1024, 2 * MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 22 * MIB, 40 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(nbytes: int, block: int, segment: int, pages: int) -> None:
    assert round_size(nbytes) == block
    assert reserved_by([(1, nbytes)], expandable=False) == segment
    assert reserved_by([(1, nbytes)], expandable=True) == pages


@pytest.mark.parametrize(("kib", "segments"), [(5000, 2), (4000, 1)])
def test_a_large_block_is_handed_out_whole_when_at_most_1_mib_would_remain(
    kib: int, segments: int
) -> None:
    """Of 6000 KiB 1000 stay in use: they do not become one block with the 5000 behind them and the rest of 4480."""
    blocks = [
        (1, 5000),
        (2, 6000),
        (3, 5000),
        (2, 0),
        (4, kib),
        (3, 0),
        (5, 5000 + 4480 + 6000 - kib - 512),
    ]
    events = [(key, size << 10) for key, size in blocks]
    assert reserved_by(events, expandable=False) == segments * 20 * MIB
    assert reserved_by(events, expandable=True) == 20 * MIB


@EXPANDABLE
def test_a_small_block_is_split_down_to_512_bytes(expandable: bool) -> None:
    events = [(1, MIB), (2, MIB - 512), (3, 512)]
    assert reserved_by(events, expandable=expandable) == 2 * MIB
    assert reserved_by([*events, (4, 1)], expandable=expandable) == 4 * MIB


@EXPANDABLE
def test_a_stream_gets_no_blocks_of_another(expandable: bool) -> None:
    events = [(1, 40 * MIB), (1, 0), (2, 40 * MIB)]
    assert reserved_by(events, expandable=expandable) == 40 * MIB
    assert reserved_by(events, expandable=expandable, streams={2: "gather"}) == 80 * MIB


@EXPANDABLE
def test_the_pools_share_nothing(expandable: bool) -> None:
    assert reserved_by([(1, 2 * MIB), (2, 512)], expandable=expandable) == 22 * MIB


@EXPANDABLE
def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equals(expandable: bool) -> None:
    allocator, base = allocated(expandable, 8, 2, 4, 2, 4)
    for key in (4, 2, 0):
        allocator.free(key)
    # Free are 8 MiB at 0, 4 at 10 and 4 at 16.
    assert allocator.allocate(5, 4 * MIB) == base + 10 * MIB
    assert allocator.allocate(6, 8 * MIB) == base


@EXPANDABLE
def test_equal_blocks_are_taken_from_the_lowest_address_on(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    addresses = [allocator.allocate(key, 2 * MIB) for key in range(10)]
    for key in (6, 2, 4):
        allocator.free(key)
    assert [allocator.allocate(key, 2 * MIB) for key in (10, 11, 12)] == [
        addresses[2],
        addresses[4],
        addresses[6],
    ]


@EXPANDABLE
def test_free_neighbours_become_one_block(expandable: bool) -> None:
    allocator, _ = allocated(expandable, 5, 5, 5, 5)
    for key in (0, 2, 1):
        allocator.free(key)
    allocator.allocate(4, 9 * MIB + MIB // 2)
    assert allocator.reserved == 20 * MIB


def test_segments_do_not_grow_together_but_pages_do() -> None:
    events = [(1, 20 * MIB), (2, 20 * MIB), (1, 0), (2, 0), (3, 30 * MIB)]
    assert reserved_by(events, expandable=False) == 70 * MIB
    assert reserved_by(events, expandable=True) == 40 * MIB


def test_an_expandable_segment_grows_from_its_free_end() -> None:
    allocator, _ = allocated(True, 15, 15)
    assert allocator.reserved == 40 * MIB


def test_a_block_that_can_still_grow_counts_as_large_as_it_can_become() -> None:
    # 8 MiB at 0 are freed; 6 MiB at 14 are the end of the segment, the best fit for 5 MiB where it cannot grow.
    for expandable, expected in ((False, 14 * MIB), (True, 0)):
        allocator, base = allocated(expandable, 8, 6)
        allocator.free(0)
        assert allocator.allocate(2, 5 * MIB) == base + expected


@EXPANDABLE
def test_the_end_that_can_grow_is_taken_where_nothing_else_fits(expandable: bool) -> None:
    allocator, _ = allocated(expandable, 4, 6)
    allocator.free(0)
    allocator.allocate(2, 9 * MIB)
    assert allocator.reserved == 20 * MIB


@EXPANDABLE
def test_a_storage_that_is_resized_holds_both_blocks_for_a_moment(expandable: bool) -> None:
    assert (
        reserved_by([(1, 14 * MIB), (1, 16 * MIB)], expandable=expandable)
        == (40 if expandable else 30) * MIB
    )
    assert reserved_by([(1, 4 * MIB), (1, 6 * MIB), (2, 14 * MIB)], expandable=True) == 40 * MIB, (
        "6 live behind free 4"
    )


@EXPANDABLE
def test_empty_storages_take_no_block_and_a_block_is_freed_once(expandable: bool) -> None:
    assert reserved_by([(7, 0), (7, 0)], expandable=expandable) == 0
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(1, 512)
    assert 1 in allocator
    allocator.free(1)
    assert 1 not in allocator
    with pytest.raises(KeyError):
        allocator.free(1)
    with pytest.raises(AssertionError, match="empty storage"):
        allocator.allocate(1, 0)


@given(actions=ACTIONS, expandable=st.booleans())
def test_all_of_it_is_whole_again_once_all_is_free(actions: list[Action], expandable: bool) -> None:
    """Each segment, or what pages grew by, can be had as one block then: no free neighbour was missed."""
    allocator, live, grown = CachingAllocator(expandable=expandable), [], []
    for key, (action, number) in enumerate(actions):
        before = allocator.reserved
        live += drive(allocator, [(action, number)], key) if action == "allocate" else []
        if action == "free" and live:
            allocator.free(live.pop(number % len(live)))
        grown += [allocator.reserved - before] if allocator.reserved > before else []
    for key in live:
        allocator.free(key)
    reserved = allocator.reserved
    blocks = [
        size for nbytes in grown for size in ([MIB, MIB] if nbytes == SMALL_SEGMENT else [nbytes])
    ]
    for key, nbytes in enumerate(sorted(blocks, reverse=True)):
        allocator.allocate(key, nbytes)
    assert allocator.reserved == reserved


@given(actions=ACTIONS, after=ACTIONS, expandable=st.booleans(), data=st.data())
def test_the_order_of_frees_in_a_row_does_not_matter(
    actions: list[Action], after: list[Action], expandable: bool, data: st.DataObject
) -> None:
    one, other = CachingAllocator(expandable=expandable), CachingAllocator(expandable=expandable)
    keys = list(drive(one, actions))
    drive(other, actions)
    freed = data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
    for key in freed:
        one.free(key)
    for key in data.draw(st.permutations(freed)):
        other.free(key)
    assert drive(one, after, len(actions)) == drive(other, after, len(actions))
    assert one.reserved == other.reserved


@given(actions=ACTIONS)
def test_expandable_segments_reserve_exactly_the_pages_below_the_highest_address(
    actions: list[Action],
) -> None:
    allocator = CachingAllocator(expandable=True)
    low: dict[int, int] = {}  # page size -> the first address of its pool
    high: dict[int, int] = {}
    for key, (action, nbytes) in enumerate(actions):
        if action == "allocate":
            start = allocator.allocate(key, nbytes)
            page = SMALL_SEGMENT if nbytes <= MIB else LARGE_SEGMENT
            low.setdefault(page, start)
            high[page] = max(high.get(page, 0), start + round_size(nbytes))
        elif key - 1 in allocator:
            allocator.free(key - 1)
        assert allocator.reserved == sum(
            -(-(high[page] - low[page]) // page) * page for page in low
        )


@EXPANDABLE
def test_sixty_thousand_events_take_a_moment(expandable: bool) -> None:
    """0.05 s on one core; the bound only catches work that grows with the square of the events."""
    sizes = (4096, 512, 32 * MIB, 8 * MIB, 16 * MIB, 2 * MIB + 512, 112 * MIB, 100_000)
    survivors = range(0, 20_000, 2)
    events: list[Event] = [
        event for key in range(20_000) for event in _made(key, sizes[key * 7 % 8], key % 2 == 0)
    ]
    events += [
        event for key in reversed(survivors) for event in ((key + 20_000, sizes[key % 5]), (key, 0))
    ]
    events += [(key + 20_000, 0) for key in survivors]
    assert len(events) == 60_000
    begin = time.process_time()
    reserved_by(events, expandable=expandable)
    assert time.process_time() - begin < 1.5


def _made(key: int, nbytes: int, lives: bool) -> tuple[Event, ...]:
    return ((key, nbytes),) if lives else ((key, nbytes), (key, 0))
