"""A block of rows becomes arrays: the part of reading a data file that runs in other processes."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autofit.core.errors import InputError
from autofit.data.options import IGNORED_LABEL
from autofit.data.row_source import Block, Piece
from autofit.data.rows import (
    ANSWERS,
    JUDGED,
    LABELLED,
    PAIR,
    TAGGED,
    TWINS,
    Accounts,
    FirstRow,
    Rows,
)
from autofit.data.tokens import Encoding, encode, encode_piece

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Values:
    """The distinct labels of rows in order of appearance, each with its first location."""

    values: list[Any] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        """Each with its location."""
        return zip(self.values, self.locations, strict=True)

    def number(self, value: Any, location: str) -> int:
        """The place of a label among them."""
        hashable = value
        if not isinstance(value, Hashable):
            hashable = repr(value)

        key = (type(value), hashable)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
            self.locations.append(location)
        return self._numbers[key]


@dataclass
class Encoded:
    """What a block holds: numbers of all its rows one after the other, and how many each row has.

    Attributes:
        labels: a list of none where they are the ids.
        is_learnt: for each row whether it has a label that counts.
        values: the labels or tags; `classes` and, of tagged words, `labels` hold places among them.
            Without any, `classes` are numbers.
        tools: how many rows have tools, and the messages and tools of the first one, as JSON.
        ends: of a piece of a text, as `encode_piece` gives them.
    """

    ids: Array
    lengths: Array
    labels: Array
    label_lengths: Array
    types: Array
    is_learnt: Array
    cut: int = 0
    classes: Array | None = None
    values: Values = field(default_factory=Values)
    accounts: Accounts = field(default_factory=Accounts)
    tools: tuple[int, tuple[str, str] | None] = (0, None)
    piece: Piece | None = None
    ends: Sequence[Any] = (None, None)


@dataclass(frozen=True)
class Encoder:
    """Makes token ids and labels of blocks.

    Attributes:
        shifted: the first token of a row is not predicted.
    """

    encoding: Encoding
    first: FirstRow
    shifted: bool

    def __call__(self, block: Block) -> Encoded:
        """The arrays of a block; an InputError names what is wrong with a row, and where."""
        if isinstance(block.rows, Piece):
            return self._piece(block.rows, block)

        table = self.first.table()
        for location, row in block.rows:
            table.add(row, location, block)
        rows = Rows(table.form, table.columns, table.locations)

        values = Values()
        classes = None
        if rows.form in (LABELLED, JUDGED):
            labelled = zip(rows.columns["label"], rows.locations, strict=True)
            classes = np.array([values.number(*label) for label in labelled], np.int64)
        elif rows.form == TAGGED:
            rows = _numbered_tags(rows, values)
        elif table.desirable:
            classes = np.array(table.desirable, np.int64)

        columns = encode(rows, self.encoding)
        ids, lengths = _flat(columns["input_ids"])
        labels, label_lengths = _flat(columns["labels"])
        types, _ = _flat(columns.get("types", []))

        tools = table.columns.get("tools", ())
        with_tools = [number for number, given in enumerate(tools) if given]
        shown = None
        if with_tools:
            first = with_tools[0]
            shown = (table.columns["messages"][first], tools[first])

        return Encoded(
            ids,
            lengths,
            labels,
            label_lengths,
            types,
            self._is_learnt(rows.form, columns, lengths, label_lengths),
            cut=sum(columns["cut"]),
            classes=classes,
            values=values,
            accounts=table.accounts,
            tools=(len(with_tools), shown),
        )

    def _piece(self, piece: Piece, block: Block) -> Encoded:
        """The arrays of a piece of a text, which is a row, or a part of one."""
        table = self.first.table()
        table.add({"text": piece.text}, piece.location, block)
        ids, ends = encode_piece(self.encoding, piece)
        lengths = np.array([len(ids)])
        is_learnt = lengths > int(self.shifted)
        none = ids[:0]

        return Encoded(
            ids,
            lengths,
            none,
            np.zeros(1, np.int64),
            none,
            is_learnt,
            accounts=table.accounts,
            piece=replace(piece, before="", text="", after=""),
            ends=ends,
        )

    def _is_learnt(
        self,
        form: tuple[str, ...],
        columns: dict[str, Any],
        lengths: Array,
        label_lengths: Array,
    ) -> Array:
        """For each row whether it has a label that counts, [rows]."""
        if form == ANSWERS:
            return label_lengths > 0
        if form in (LABELLED, TWINS, JUDGED):
            return lengths > 0

        skipped = int(self.shifted)
        if form != PAIR and not label_lengths.any():
            return lengths > skipped
        counts = [np.any(np.asarray(row)[skipped:] != IGNORED_LABEL) for row in columns["labels"]]

        return np.array(counts, bool)


def _numbered_tags(rows: Rows, values: Values) -> Rows:
    """Rows whose tags are places among the values."""
    tags = []
    columns = rows.columns
    for words, given, location in zip(
        columns["tokens"],
        columns["tags"],
        rows.locations,
        strict=True,
    ):
        if len(words) != len(given):
            message = f"{location}: {len(words)} words have {len(given)} tags."
            raise InputError(message, "Give each word one tag.")

        tags.append([values.number(tag, location) for tag in given])

    return replace(rows, columns={**columns, "tags": tags})


def _flat(rows: Sequence[Any]) -> tuple[Array, Array]:
    """The numbers of all rows one after the other, and how many each one has."""
    lengths = np.array(list(map(len, rows)), np.int64)
    if not lengths.any():
        return np.zeros(0, np.int32), lengths

    arrays = [np.asarray(row, np.int32) for row in rows]
    return np.concatenate(arrays), lengths
