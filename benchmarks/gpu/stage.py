"""A stage of the GPU benchmark: what it runs, and how it summarizes what it has stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.store import Store


@dataclass(frozen=True)
class Table:
    """What Markdown shows of some figures; cells are None where there is nothing to tell."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | None]]


@dataclass(frozen=True)
class Summary:
    """The figures of a stage by name, tables of them, and sentences: what was left out, and what failed."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Stage:
    """`run` measures what is still missing and stores each piece; it raises LeftOutError where it cannot, TimeUp where
    too little time is left for the next piece. `summarize` makes the figures from what is stored, and opens nothing.

    `share` is what it may take of the time that is left while others wait; without `least_seconds` it is not begun.
    """

    name: str
    share: float
    least_seconds: float
    run: Callable[[Bench], None]
    summarize: Callable[[Store], Summary]
