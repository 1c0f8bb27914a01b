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
    DoesNotFitError,
    Event,
    Replay,
    replay,
    round_size,
)

MIB = 1 << 20
Action = tuple[str, int]
EXPANDABLE = pytest.mark.parametrize("expandable", [False, True])

# Sizes at which a rule changes, and any in between.
SIZES = st.one_of(
    st.sampled_from([1, 512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 11 * MIB, 20 * MIB, 20 * MIB + 1]),
    st.integers(1, 4096),
    st.integers(1, 50 * MIB),
)
# An allocation and its bytes, or a free and which of the live blocks.
ACTIONS = st.lists(
    st.one_of(st.tuples(st.just("allocate"), SIZES), st.tuples(st.just("free"), st.integers(0, 50))),
    min_size=20,  # shorter lists rarely fill a segment; the cases by hand are short
    max_size=80,
)


def allocated(expandable: bool, *mib: int) -> tuple[CachingAllocator, int]:
    """An allocator with one block of each size under the keys 0, 1, ... side by side, and the address of the first."""
    allocator = CachingAllocator(expandable=expandable)
    addresses = [allocator.allocate(key, size * MIB) for key, size in enumerate(mib)]
    assert addresses == [addresses[0] + sum(mib[:key]) * MIB for key in range(len(mib))]
    return allocator, addresses[0]


def drive(allocator: CachingAllocator, actions: Sequence[Action], first_key: int = 0) -> dict[int, tuple[int, int]]:
    """Run the actions and check after each one what always holds; key -> (address, bytes) of what lives at the end."""
    live: dict[int, tuple[int, int]] = {}
    for key, (action, number) in enumerate(actions, first_key):
        if action == "allocate":
            try:
                live[key] = (allocator.allocate(key, number), number)
            except DoesNotFitError:
                assert allocator.limit is not None
        elif live:
            freed = list(live)[number % len(live)]
            allocator.free(freed)
            del live[freed]
        check(allocator, live)
    return live


def check(allocator: CachingAllocator, live: dict[int, tuple[int, int]]) -> None:
    ranges = sorted((address, address + round_size(nbytes)) for address, nbytes in live.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges)), "blocks overlap"
    assert all(address % 512 == 0 for address, _ in ranges)
    assert sum(end - start for start, end in ranges) <= allocator.allocated <= allocator.reserved
    assert allocator.allocated <= allocator.peak_allocated <= allocator.peak_reserved
    assert allocator.reserved <= allocator.peak_reserved
    assert allocator.limit is None or allocator.peak_reserved <= allocator.limit


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
    assert replay([(1, nbytes)], expandable=False) == Replay(block, segment, 0)
    assert replay([(1, nbytes)], expandable=True) == Replay(block, pages, 0)


def test_a_large_block_is_handed_out_whole_when_at_most_1_mib_would_remain() -> None:
    assert replay([(1, 11 * MIB)], expandable=False) == Replay(12 * MIB, 12 * MIB, 0)
    assert replay([(1, 11 * MIB - 512)], expandable=False) == Replay(11 * MIB - 512, 12 * MIB, 0)
    assert replay([(1, 11 * MIB)], expandable=True) == Replay(11 * MIB, 20 * MIB, 0)


@EXPANDABLE
def test_a_small_block_is_split_down_to_512_bytes(expandable: bool) -> None:
    events = [(1, MIB), (2, MIB - 512), (3, 512)]
    assert replay(events, expandable=expandable) == Replay(2 * MIB, 2 * MIB, 0)
    assert replay([*events, (4, 1)], expandable=expandable) == Replay(2 * MIB + 512, 4 * MIB, 0)


@EXPANDABLE
def test_the_pools_share_nothing(expandable: bool) -> None:
    assert replay([(1, 2 * MIB), (2, 512)], expandable=expandable).peak_reserved == 22 * MIB


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
    assert [allocator.allocate(key, 2 * MIB) for key in (10, 11, 12)] == [addresses[2], addresses[4], addresses[6]]


@EXPANDABLE
def test_free_neighbours_become_one_block(expandable: bool) -> None:
    allocator, _ = allocated(expandable, 5, 5, 5, 5)
    for key in (0, 2, 1):
        allocator.free(key)
    allocator.allocate(4, 9 * MIB + MIB // 2)
    assert allocator.reserved == 20 * MIB


def test_segments_do_not_grow_together_but_pages_do() -> None:
    events = [(1, 20 * MIB), (2, 20 * MIB), (1, 0), (2, 0), (3, 30 * MIB)]
    assert replay(events, expandable=False) == Replay(40 * MIB, 70 * MIB, 0)
    assert replay(events, expandable=True) == Replay(40 * MIB, 40 * MIB, 0)


def test_an_expandable_segment_grows_from_its_free_end() -> None:
    allocator, _ = allocated(True, 15, 15)
    assert allocator.reserved == 40 * MIB


def test_a_block_that_can_still_grow_counts_as_large_as_it_can_become() -> None:
    # 8 MiB at 0 are freed; 6 MiB at 14 are the end of the segment, the best fit for 5 MiB where it cannot grow.
    for expandable, expected in ((False, 14 * MIB), (True, 0)):
        allocator, base = allocated(expandable, 8, 6)
        allocator.free(0)
        assert allocator.allocate(2, 5 * MIB) == base + expected


@pytest.mark.parametrize(("other", "expected"), [(30, 10), (29, 40)])
def test_a_block_before_a_hole_can_grow_into_it(other: int, expected: int) -> None:
    allocator, base = allocated(True, 10, 30, other, 60 - other)  # five pages, none free at the end
    allocator.free(1)
    allocator.empty_cache()  # leaves 10 MiB free at 10, which can grow to 30
    allocator.free(2)
    assert allocator.allocate(4, 5 * MIB) == base + expected * MIB


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_holes_side_by_side_count_as_one(order: tuple[int, int]) -> None:
    allocator, base = allocated(True, 10, 30, 20, 40, 20)
    for key in order:
        allocator.free(key)
        allocator.empty_cache()
    allocator.free(3)  # 40 MiB, fewer than the 10 at 10 can become with both holes of 20
    assert allocator.allocate(5, 5 * MIB) == base + 60 * MIB


@EXPANDABLE
def test_the_end_that_can_grow_is_taken_where_nothing_else_fits(expandable: bool) -> None:
    allocator, _ = allocated(expandable, 4, 6)
    allocator.free(0)
    allocator.allocate(2, 9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_whole_segments_are_given_back_under_pressure() -> None:
    events = [(1, 20 * MIB), (1, 0), (2, 30 * MIB)]
    assert replay(events, expandable=False) == Replay(30 * MIB, 50 * MIB, 0)
    assert replay(events, expandable=False, limit=50 * MIB) == Replay(30 * MIB, 50 * MIB, 0)
    assert replay(events, expandable=False, limit=50 * MIB - 1) == Replay(30 * MIB, 30 * MIB, 1)


def test_the_peak_outlives_what_is_given_back() -> None:
    events = [(1, 30 * MIB), (1, 0), (2, 512)]
    assert replay(events, expandable=False, limit=31 * MIB) == Replay(30 * MIB, 30 * MIB, 1)
    assert replay(events, expandable=True, limit=41 * MIB) == Replay(30 * MIB, 40 * MIB, 1)


def test_a_segment_whose_first_block_alone_is_free_is_not_given_back() -> None:
    allocator, _ = allocated(False, 5, 5)
    allocator.free(0)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB


def test_a_segment_in_use_in_part_is_not_given_back() -> None:
    allocator = CachingAllocator(expandable=False, limit=40 * MIB)
    allocator.allocate(1, 5 * MIB)
    with pytest.raises(DoesNotFitError, match="31457280 more bytes do not fit into 41943040 bytes, of which 20971520"):
        allocator.allocate(2, 30 * MIB)
    assert (allocator.reserved, allocator.allocated, allocator.retries) == (20 * MIB, 5 * MIB, 1)
    allocator.free(1)
    allocator.allocate(2, 30 * MIB)
    assert (allocator.reserved, allocator.retries) == (30 * MIB, 2)


def test_both_pools_give_back_under_pressure() -> None:
    events = [(1, 512), (1, 0), (2, 20 * MIB), (2, 0), (3, 30 * MIB)]
    assert replay(events, expandable=False, limit=31 * MIB) == Replay(30 * MIB, 30 * MIB, 1)
    assert replay(events, expandable=True, limit=41 * MIB) == Replay(30 * MIB, 40 * MIB, 1)


def test_pages_in_the_middle_are_given_back_and_filled_again_from_the_lowest_on() -> None:
    allocator, base = allocated(True, 30, 30, 20)
    assert allocator.reserved == 80 * MIB
    allocator.free(0)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB  # the page at 20 is in use from 30 on
    assert allocator.allocate(3, 40 * MIB) == base + 80 * MIB  # does not fit into the 30 MiB at 0
    assert allocator.reserved == 100 * MIB
    assert allocator.allocate(4, 25 * MIB) == base  # the hole of 20 and the free 10 behind it
    assert allocator.reserved == 120 * MIB


def test_a_hole_is_only_mapped_as_far_as_needed() -> None:
    allocator, base = allocated(True, 60, 20)
    allocator.free(0)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    assert allocator.allocate(2, 25 * MIB) == base
    assert allocator.reserved == 60 * MIB
    assert allocator.allocate(3, 30 * MIB) == base + 25 * MIB  # 15 that are mapped and the hole of 20 behind them
    assert allocator.reserved == 80 * MIB


def test_holes_side_by_side_are_one() -> None:
    allocator, base = allocated(True, 20, 20, 20, 20, 20)
    for key in (0, 2, 1):
        allocator.free(key)
        allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert allocator.allocate(5, 60 * MIB) == base


def test_the_limit_counts_whole_pages() -> None:
    assert replay([(1, 12 * MIB)], expandable=False, limit=12 * MIB).peak_reserved == 12 * MIB
    with pytest.raises(DoesNotFitError):
        replay([(1, 12 * MIB)], expandable=True, limit=20 * MIB - 1)
    assert replay([(1, 12 * MIB)], expandable=True, limit=20 * MIB).peak_reserved == 20 * MIB


def test_an_expandable_segment_is_refused_by_the_size_of_a_segment_even_where_fewer_pages_would_do() -> None:
    events = [(1, 8 * MIB), (2, 14 * MIB)]  # 12 free, 2 more needed: a page of 20
    assert replay(events, expandable=True, limit=40 * MIB).peak_reserved == 40 * MIB
    events = [(1, 2 * MIB), (2, 38 * MIB)]
    assert replay(events, expandable=True, limit=58 * MIB).peak_reserved == 40 * MIB
    with pytest.raises(DoesNotFitError):
        replay(events, expandable=True, limit=58 * MIB - 1)


@EXPANDABLE
def test_a_storage_that_is_resized_holds_both_blocks_for_a_moment(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(1, 4 * MIB)
    allocator.allocate(1, 6 * MIB)
    assert (allocator.allocated, allocator.peak_allocated) == (6 * MIB, 10 * MIB)
    allocator.free(1)
    assert allocator.allocated == 0


@EXPANDABLE
def test_empty_storages_take_no_block_and_a_block_is_freed_once(expandable: bool) -> None:
    assert replay([(7, 0), (7, 0)], expandable=expandable) == Replay(0, 0, 0)
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(1, 512)
    assert 1 in allocator
    allocator.free(1)
    assert 1 not in allocator
    with pytest.raises(KeyError):
        allocator.free(1)
    with pytest.raises(AssertionError, match="empty storage"):
        allocator.allocate(1, 0)


@given(actions=ACTIONS, expandable=st.booleans(), limit=st.none() | st.integers(0, 200 * MIB))
def test_blocks_never_overlap_and_the_limit_holds(actions: list[Action], expandable: bool, limit: int | None) -> None:
    drive(CachingAllocator(expandable=expandable, limit=limit), actions)


@given(actions=ACTIONS, expandable=st.booleans(), limit=st.none() | st.integers(0, 200 * MIB))
def test_all_of_it_can_be_given_back_once_all_is_free(
    actions: list[Action], expandable: bool, limit: int | None
) -> None:
    """A segment is given back only where it is one free block: no free neighbour was missed."""
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    for key in drive(allocator, actions):
        allocator.free(key)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


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
    assert (one.reserved, one.allocated, one.peak_reserved) == (other.reserved, other.allocated, other.peak_reserved)


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
        assert allocator.reserved == sum(-(-(high[page] - low[page]) // page) * page for page in low)


@given(actions=ACTIONS, expandable=st.booleans())
def test_a_limit_at_the_free_peak_changes_nothing_and_one_below_holds(actions: list[Action], expandable: bool) -> None:
    events = [(key, nbytes) if action == "allocate" else (key - 1, 0) for key, (action, nbytes) in enumerate(actions)]
    free = replay(events, expandable=expandable)
    # alloc_block weighs a whole segment where pages would do with less: room for the largest possible one.
    assert replay(events, expandable=expandable, limit=free.peak_reserved + 52 * MIB) == free
    try:
        limited = replay(events, expandable=expandable, limit=max(0, free.peak_reserved - 1))
    except DoesNotFitError as error:
        assert error.size + error.reserved > error.limit - LARGE_SEGMENT
    else:
        assert limited.peak_reserved < free.peak_reserved or not free.peak_reserved
        assert limited.retries > 0 or not free.peak_reserved


@EXPANDABLE
def test_sixty_thousand_events_take_a_moment(expandable: bool) -> None:
    """0.05 s on one core; the bound only catches work that grows with the square of the events."""
    sizes = (4096, 512, 32 * MIB, 8 * MIB, 16 * MIB, 2 * MIB + 512, 112 * MIB, 100_000)
    survivors = range(0, 20_000, 2)
    events: list[Event] = [event for key in range(20_000) for event in _made(key, sizes[key * 7 % 8], key % 2 == 0)]
    events += [event for key in reversed(survivors) for event in ((key + 20_000, sizes[key % 5]), (key, 0))]
    events += [(key + 20_000, 0) for key in survivors]
    assert len(events) == 60_000
    begin = time.process_time()
    replay(events, expandable=expandable)
    assert time.process_time() - begin < 1.5


def _made(key: int, nbytes: int, lives: bool) -> tuple[Event, ...]:
    return ((key, nbytes),) if lives else ((key, nbytes), (key, 0))
