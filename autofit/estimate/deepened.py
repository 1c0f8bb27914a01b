"""The events of a deep model, from those of two models with fewer of its blocks.

Every block between the first ones and the last ones does the same as the block before it. So the
events of more blocks follow from those of few: a copy of a block's events comes after that block's,
wherever in the step these are. Whether this holds for a model and a config is tried first: the
shallower trace, made one period deeper, must give the events of the deeper one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from autofit.estimate.recorder import OUTER, Event, Mark
from autofit.estimate.step_trace import Trace

# An item's block, None where it belongs to none, and how many items of the block come before it.
_Key = tuple[int | None, int]

_MARK = "mark"
_PRODUCT = "product"
_COMPLETE = "complete"
_EVENT = "event"


class _Item(NamedTuple):
    """An event, or what is known to happen between two events.

    Attributes:
        kind: of one of those above.
        detail: the phase that begins at a mark, or whose first matrix product this is.
        home: of a storage, the item that it begins with.
        nbytes: of an event.
        label, stream: of the storage.
    """

    kind: str
    detail: str = ""
    home: _Key | None = None
    nbytes: int = 0
    label: str | None = None
    stream: str | None = None

    def at(self, home: "_Key") -> "_Item":
        """The same of a storage that begins elsewhere."""
        return _Item(self.kind, self.detail, home, self.nbytes, self.label, self.stream)


@dataclass(frozen=True)
class _Sequence:
    """Items in their order, by keys.

    Attributes:
        keys: in order.
        items: by key.
        period: how many blocks repeat.
        early: how many of the first blocks may do something else than those that follow them. The
            period behind them is what is copied.
    """

    keys: tuple[_Key, ...]
    items: dict[_Key, _Item]
    period: int
    early: int

    @cached_property
    def last_early(self) -> int:
        """The last block before those that are put in, which are copies of the period that ends
        with it."""
        return self.early + self.period - 1

    def deeper(self, periods: int) -> "_Sequence | None":
        """With so many more periods of blocks; None where the items do not follow each other alike
        in all of them."""
        added = periods * self.period
        following = dict(zip(self.keys, self.keys[1:], strict=False))

        keys: list[_Key] = []
        items: dict[_Key, _Item] = {}
        key: _Key | None = self.keys[0]
        while key is not None:
            if key in items:
                return None

            own = self._original_of(key, added)
            item = self.items.get(own)
            if item is None:
                return None

            if item.home is not None:
                item = item.at(self._moved(item.home, own, key, added))

            keys.append(key)
            items[key] = item
            after = following.get(own)
            key = None if after is None else self._moved(after, own, key, added)

        before_copied = self.last_early - self.period
        copied = sum(
            block is not None and before_copied < block <= self.last_early for block, _ in self.keys
        )
        if len(keys) != len(self.keys) + periods * copied:
            return None

        return replace(
            self,
            keys=tuple(keys),
            items=items,
        )

    def _original_of(self, key: _Key, added: int) -> _Key:
        """The item here that an item of the deeper sequence is a copy of."""
        block, number = key
        if block is None or block <= self.last_early:
            return key
        if block > self.last_early + added:
            return block - added, number

        beyond = (block - self.last_early - 1) % self.period

        return self.last_early - self.period + 1 + beyond, number

    def _moved(
        self,
        other: _Key,
        own: _Key,
        key: _Key,
        added: int,
    ) -> _Key:
        """Where an item is in the deeper sequence that one finds from `own` here, which is at `key`
        there."""
        block, number = other
        if block is None:
            return other

        # Neighbours stay neighbours; the first and the last blocks stay at their ends.
        if own[0] is not None and key[0] is not None and abs(block - own[0]) <= self.early:
            return block + key[0] - own[0], number
        if block > self.last_early:
            block += added

        return block, number


def deepened(
    less: Trace,
    more: Trace,
    period: int,
    missing: int,
    early: int,
) -> Trace | None:
    """A trace with the events of the whole model, and without costs.

    Args:
        less: the trace of a model of fewer blocks.
        more: the trace of one with a period of blocks more.
        missing: how many periods the whole model has more than that.
        early: how many of the first blocks may do something else.

    Returns:
        None where the events of blocks do not repeat.
    """
    shallow = _items_of(less, period, early)
    deep = _items_of(more, period, early)
    grown = shallow.deeper(1)
    if grown is None or grown.keys != deep.keys:
        return None

    # What belongs to no block may hold something of each, and then grows by as much with each.
    growth: dict[_Key, int] = {}
    for key, item in deep.items.items():
        expected = grown.items[key]
        if key[0] is None and expected.nbytes and item.nbytes:
            growth[key] = item.nbytes - expected.nbytes
            expected = expected._replace(nbytes=item.nbytes)

        if item != expected:
            return None

    whole = deep.deeper(missing)
    if whole is None:
        return None

    return _trace_of(
        whole,
        more,
        growth,
        missing,
    )


def reach_of(traced: Trace) -> int:
    """From a block in the middle of a shortened model to the farthest one during whose forward or
    backward something of it is freed or made, or beside whose events its own come."""
    assert traced.depth, "it was shortened"
    early = traced.depth.early
    middle = range(early, early + traced.depth.period)
    placed = _placed(traced)
    marks = iter(traced.marks)
    section: int | None = None
    before: int | None = None
    farthest = 0
    for (item, _), block in zip(placed, _blocks_of(placed, traced), strict=True):
        if item.kind == _MARK:
            section = next(marks).block

        for one, other in ((block, section), (block, before), (before, block)):
            if one in middle and one is not None and other is not None:
                farthest = max(farthest, abs(other - one))

        before = block

    return farthest


def _items_of(traced: Trace, period: int, early: int) -> _Sequence:
    """The items of a trace."""
    placed = _placed(traced)
    blocks = _blocks_of(placed, traced)

    count: Counter[int | None] = Counter()
    keys: list[_Key] = []
    items: dict[_Key, _Item] = {}
    homes: dict[int, _Key] = {}
    for (item, storage), block in zip(placed, blocks, strict=True):
        key = block, count[block]
        count[block] += 1
        if storage is not None:
            home = homes.setdefault(storage, key)
            label = traced.labels.get(storage)
            stream = traced.streams.get(storage)
            item = _Item(item.kind, item.detail, home, item.nbytes, label, stream)

        keys.append(key)
        items[key] = item

    return _Sequence(
        tuple(keys),
        items,
        period,
        early,
    )


def _placed(traced: Trace) -> list[tuple[_Item, int | None]]:
    """The items of a trace in their order, each with the storage that it is about."""
    between: dict[int, list[tuple[_Item, int | None]]] = {}
    for mark in traced.marks:
        between.setdefault(mark.events, []).append((_Item(_MARK, mark.phase), None))

    for phase, number in traced.products.items():
        between.setdefault(number, []).append((_Item(_PRODUCT, phase), None))

    for storage, number in traced.completed.items():
        between.setdefault(number, []).append((_Item(_COMPLETE), storage))

    in_blocks = set[int]()
    for mark, after in pairwise(traced.marks):
        if mark.block is not None:
            in_blocks.update(range(mark.events, after.events))

    placed: list[tuple[_Item, int | None]] = []
    freed: list[int] = []

    def place_freed() -> None:
        # Of frees in a row the order makes no difference, and autocast's cache has none.
        placed.extend((_Item(_EVENT), storage) for storage in sorted(freed))
        freed.clear()

    for number, event in enumerate(traced.events):
        sortable = not event.nbytes and number not in in_blocks
        if number in between or not sortable:
            place_freed()

        placed += between.pop(number, [])
        if sortable:
            freed.append(event.storage)
        else:
            placed.append((_Item(_EVENT, nbytes=event.nbytes), event.storage))

    place_freed()
    for _, rest in sorted(between.items()):
        placed += rest

    return placed


def _blocks_of(placed: Sequence[tuple[_Item, int | None]], traced: Trace) -> list[int | None]:
    """The block that each item belongs to: the one in whose forward or backward its storage is
    made, else the one that the storage is known to belong to, else that of the next item."""
    marks = iter(traced.marks)
    section: int | None = None
    made_in: dict[int, int] = {}
    found: list[int | None] = []
    for item, storage in placed:
        if item.kind == _MARK:
            section = next(marks).block
        if storage is None:
            found.append(OUTER if section is None else section)
            continue

        if section is not None:
            made_in.setdefault(storage, section)

        found.append(
            made_in.get(
                storage,
                traced.kin.get(storage),
            )
        )

    after = OUTER
    filled: dict[int, int] = {}
    for (_, storage), block in zip(reversed(placed), reversed(found), strict=True):
        if block is not None:
            after = block
        if storage is not None:
            filled[storage] = after

    for number, (_, storage) in enumerate(placed):
        if storage is not None:
            found[number] = filled[storage]

    return [None if block == OUTER else block for block in found]


def _trace_of(
    whole: _Sequence,
    like: Trace,
    growth: dict[_Key, int],
    periods: int,
) -> Trace:
    """A trace of these items."""
    numbers: dict[_Key, int] = {}
    events: list[Event] = []
    marks: list[Mark] = []
    labels: dict[int, str] = {}
    streams: dict[int, str] = {}
    completed: dict[int, int] = {}
    products: dict[str, int] = {}
    for key in whole.keys:
        item = whole.items[key]
        if item.kind == _MARK:
            marks.append(
                Mark(
                    len(events),
                    0,
                    0,
                    item.detail,
                    key[0],
                )
            )

            continue

        if item.kind == _PRODUCT:
            products[item.detail] = len(events)
            continue

        assert item.home is not None, "of a storage"
        storage = numbers.setdefault(
            item.home,
            len(numbers) + 1,
        )
        if item.label is not None:
            labels[storage] = item.label
        if item.stream is not None:
            streams[storage] = item.stream
        if item.kind == _COMPLETE:
            completed[storage] = len(events)
        else:
            nbytes = item.nbytes + periods * growth.get(key, 0)
            events.append(Event(storage, nbytes))

    return replace(
        like,
        events=tuple(events),
        marks=tuple(marks),
        labels=labels,
        streams=streams,
        completed=completed,
        products=products,
        owners={},
        costs=(),
        collectives=(),
        between={},
    )
