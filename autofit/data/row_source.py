"""The nouns that readers of data files share: what is wanted of a file, and the rows in it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK = 2**21  # characters of the rows of a block

Row = Mapping[str, Any]  # its fields by the names of their columns
Located = tuple[str, Any]  # a row after its location ("FILE, line 3")


@dataclass(frozen=True)
class Wanted:
    """What is looked for in a data file.

    Attributes:
        names: of columns; others need not be read.
        fits: whether a row has the fields that are needed.
        text: a plain text is a sample, too.
        by_line: each line of a plain text is one.
    """

    names: frozenset[str]
    fits: Callable[[Row], bool]
    text: bool
    by_line: bool


@dataclass(frozen=True)
class Piece:
    """A part of a text that is one row.

    Attributes:
        before: the text that stands before it, as far as tokens may depend on it.
        after: the same behind it.
        is_last: the row ends with it.
    """

    location: str
    before: str
    text: str
    after: str
    is_last: bool


@dataclass(frozen=True)
class Block:
    """Some rows, one after the other, or a piece of one.

    Attributes:
        rows: located rows, which may be read where they are needed, in another process.
        position: how many bytes of the file are read then; None where that is not known.
        remedy: where a field is missing.
        columnar: from Arrow, which fills in null for the keys that only other rows have.
    """

    rows: Iterable[Located] | Piece
    position: int | None = None
    remedy: str = ""
    columnar: bool = False


# Each with the bytes of the files that are read after it.
Blocks = Iterator[tuple[Block, int]]


@dataclass(frozen=True)
class RowSource:
    """Rows before they are checked, each with its location.

    Attributes:
        parts: gives the same rows in blocks that are yet to be read, each with its position in the
            file; None where there are only `rows`.
        size: the bytes of the file; 0 where that is not known.
    """

    rows: Iterable[Located]
    remedy: str = ""
    columnar: bool = False
    parts: Callable[[], Iterator[tuple[Iterable[Located] | Piece, int]]] | None = None
    size: int = 0

    def blocks(self) -> Iterator[Block]:
        """The rows in blocks that are small beside the memory of a machine."""
        if self.parts is not None:
            for rows, position in self.parts():
                yield Block(rows, position, self.remedy, self.columnar)
            return

        rows = []
        size = 0
        for row in self.rows:
            rows.append(row)
            size += _size(row)
            if size > _BLOCK:
                yield Block(rows, None, self.remedy, self.columnar)
                rows = []
                size = 0

        if rows:
            yield Block(rows, None, self.remedy, self.columnar)


def first_filled(row: Row, columns: Iterable[str]) -> Any:
    """The first of the columns that holds a value; None where none does."""
    for name in columns:
        if row.get(name) is not None:
            return name

    return None


def _size(value: Any) -> int:
    """About how many characters a value takes."""
    if isinstance(value, str):
        return len(value) + 8
    if isinstance(value, Mapping):
        return sum(_size(part) for part in value.values()) + 8
    if isinstance(value, list | tuple):
        return sum(_size(part) for part in value) + 8

    return 8
