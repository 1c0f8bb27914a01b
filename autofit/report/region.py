"""Lines that stay at the bottom of a terminal and change in place, while others may print above them.

rich's Live erases all of its lines each time, and writes them again. Here only lines that changed are written, over
what stood there: no flicker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from threading import RLock
from typing import IO, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment
from rich.text import Text

Line = list[Segment]


class Region(RenderHook):
    """The lines, from `start` to `stop`. The cursor waits below them, at the left.

    What Python code prints meanwhile comes above them. Lines are narrower than the terminal, and fewer than its rows.
    """

    def __init__(self, console: Console) -> None:
        self.lock = RLock()
        self._console = console
        self._lines: list[Line] = []
        self._width = console.width
        self._redirected = ExitStack()

    def start(self) -> None:
        """Take what is printed from now on above the lines."""
        proxy = cast(IO[str], FileProxy(self._console, sys.stderr))
        self._redirected.enter_context(redirect_stderr(proxy))
        if sys.stdout.isatty():  # a file or a pipe disturbs nothing, and wants what it is sent
            self._redirected.enter_context(redirect_stdout(cast(IO[str], FileProxy(self._console, sys.stdout))))
        self._console.push_render_hook(self)

    def stop(self) -> None:
        """Leave nothing behind."""
        with self.lock:
            self._write(_erased(self._rows()))  # with the ^C that a terminal may have shown at the cursor
            self._lines = []
            self._console.pop_render_hook()
            self._redirected.close()

    def draw(self, lines: Sequence[Text]) -> None:
        """Make the region these lines."""
        with self.lock:
            new = [self._rendered(line) for line in lines]
            if self._width != self._console.width:  # the terminal has broken the lines as it liked
                self._write(_erased(self._rows()))
                self._lines = []
            if new != self._lines:
                self._write(_changed(self._lines, new))
                self._lines = new

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """rich's hook, called with whatever is about to be printed on the console."""
        if any(isinstance(each, _Segments) for each in renderables):
            return renderables
        with self.lock:
            above = _Segments(_erased(self._rows()))
            return [above, *renderables, _Segments(_changed([], self._lines))]

    def _rendered(self, line: Text) -> Line:
        options = self._console.options.update(no_wrap=True, overflow="crop")
        return self._console.render_lines(line, options, pad=False)[0]

    def _rows(self) -> int:
        """How many rows the lines take, at the width that the terminal has by now."""
        self._width = self._console.width
        return sum(max(1, -(-Segment.get_line_length(line) // self._width)) for line in self._lines)

    def _write(self, segments: Line) -> None:
        self._console.print(_Segments(segments), end="", crop=False)


class _Segments:
    """Segments as they are."""

    def __init__(self, segments: Line) -> None:
        self._segments = segments

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments


def _changed(old: list[Line], new: list[Line]) -> Line:
    """From below the old lines to below the new ones, writing what is not the same."""
    written: Line = []
    row = len(old)  # where the cursor is

    def to(target: int) -> None:
        nonlocal row
        if target != row:
            direction = ControlType.CURSOR_UP if target < row else ControlType.CURSOR_DOWN
            written.append(Control((direction, abs(target - row))).segment)
            row = target

    for place in range(max(len(old), len(new))):
        line = new[place] if place < len(new) else []
        if place < len(old) and place < len(new) and line == old[place]:
            continue
        to(place)
        written += [Control(ControlType.CARRIAGE_RETURN).segment, *line]
        written.append(Control((ControlType.ERASE_IN_LINE, 0)).segment)  # what stood there and was longer
        if place >= len(old):  # there may be no row below yet
            written.append(Segment.line())
            row += 1
    to(len(new))
    return [Control(ControlType.CARRIAGE_RETURN).segment, *written, Control(ControlType.CARRIAGE_RETURN).segment]


def _erased(rows: int) -> Line:
    """From below so many rows to the first of them, leaving all of them, and the cursor's, empty."""
    erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)).segment
    return [erase, *[Control((ControlType.CURSOR_UP, 1)).segment, erase] * rows]
