"""The nouns that readers of data files share: what is wanted of a file, and the rows in it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wanted:
    """What is looked for in a data file."""

    names: frozenset[str]  # of columns; others need not be read
    fits: Callable[[Mapping[str, Any]], bool]  # whether a row has the fields that are needed
    text: bool  # a plain text is a sample, too
    by_line: bool  # and each of its lines is one


@dataclass(frozen=True)
class RowSource:
    """Rows before they are checked, each with its location ("FILE, line 3")."""

    rows: Iterable[tuple[str, Any]]
    remedy: str = ""  # where a field is missing
    columnar: bool = False  # from Arrow, which fills in null for the keys that only other rows have
