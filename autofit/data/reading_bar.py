"""How far a data file is read: a bar on a terminal, elsewhere a line now and then."""

import math
import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

# On a stream that is no terminal: until the first line, and between two.
_FIRST_LINE_SECONDS = 10.0
_LINE_SECONDS = 60.0


class ReadingBar:
    """Shows on stderr how many bytes of a file are read, and how many rows.

    Args:
        label: what is done, for example "tokenising".
        total: all bytes.
    """

    def __init__(self, label: str, total: int, *, shown: bool) -> None:
        self._label = label
        self._total = total
        self._bar: tqdm[Any] | None = None
        self._due = math.inf  # when the next line is written
        if not shown:
            return

        if sys.stderr.isatty():
            self._bar = tqdm(
                desc=label,
                total=total,
                unit="B",
                unit_scale=True,
                leave=False,
            )
        else:
            self._due = time.monotonic() + _FIRST_LINE_SECONDS

    def __enter__(self) -> "ReadingBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.close()

    def update(self, position: int, rows: int) -> None:
        """So many bytes and rows are done in all."""
        if self._bar:
            self._bar.set_postfix_str(f"{rows:,} rows", refresh=False)
            self._bar.update(position - self._bar.n)

        now = time.monotonic()
        if now < self._due:
            return

        self._due = now + _LINE_SECONDS
        done = position / 1e6
        total = self._total / 1e6
        line = f"{self._label}: {rows:,} rows, {done:,.0f} MB of {total:,.0f} MB"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
