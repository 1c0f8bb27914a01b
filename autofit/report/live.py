"""Progress while a search runs: a few lines that change in place on a terminal and in a notebook,
else plain lines."""

import io
import os
import sys
import time
from collections.abc import Callable
from threading import Event as Signal
from threading import RLock, Thread
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from autofit.core.errors import pluralize
from autofit.core.events import (
    Event,
    Note,
    PhaseProgressed,
    PhaseStarted,
    ProbeFinished,
    SearchStarted,
)
from autofit.core.notebook import Cell
from autofit.core.quoting import one_line
from autofit.report.formatting import (
    OUTCOMES,
    describe,
    gib,
    peak_bytes,
    progress_line,
    rate,
    where,
    why_not,
)
from autofit.report.panel import Progress, panel
from autofit.report.terminal import Terminal

_TICK_SECONDS = 1.0  # the clock shows seconds; on a CPU, drawing takes time from the probes
_PROGRESS_SECONDS = 10.0  # between two lines that tell how far a phase has come
_CELL_FORMAT = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3">{code}</pre>'


class LiveDisplay:
    """A context manager and listener that shows the events of a search on a console, usually that
    of stderr.

    On a terminal a few lines change in place and are gone at the end. Elsewhere, under CI and on a
    terminal that cannot move its cursor, every phase of the search and every finished probe is one
    line. `quiet` shows nothing at all. In the cell of a notebook the lines change in place, too,
    and stay at the end; notes are for others to show.
    """

    def __init__(
        self,
        shown: Console | Cell,
        *,
        quiet: bool = False,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cell = shown if isinstance(shown, Cell) else None
        self._console = _cell_console() if isinstance(shown, Cell) else shown
        self._quiet = quiet
        self._seconds = seconds
        self._progress = Progress(seconds())
        self._lock = RLock()
        self._live: Live | None = None
        self._shown_at = -_PROGRESS_SECONDS  # when progress was shown last
        self._has_shown_best = False  # and whether anything fitted then
        self._ended = Signal()
        self._ticker: Thread | None = None

    def __enter__(self) -> Self:
        # Not in CI, whose logs are read later, whatever they pretend to be. FORCE_COLOR makes rich
        # take a pipe for a terminal, which is right for colours only.
        console = self._console
        is_terminal = console.is_interactive and console.file.isatty()
        is_watched = is_terminal and not os.environ.get("CI")
        if self._quiet or not (self._cell or is_watched):
            return self

        if self._cell is None:
            self._live = Live(
                get_renderable=self._panel,
                console=console,
                auto_refresh=False,
                transient=True,
                # output to a file or a pipe disturbs nothing, and wants what it is sent
                redirect_stdout=sys.stdout.isatty(),
                vertical_overflow="crop",
            )
            self._live.start()
            console.show_cursor()  # a killed search should leave it

        self._ticker = Thread(target=self._tick, name="autofit-display", daemon=True)
        self._refresh()
        self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._ticker is None:
            return

        self._ticker.join()
        self._ticker = None
        if self._live is None:
            self._refresh()
        else:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        with self._lock:
            line = self._line(event)  # before the update, which it describes
            self._progress.update(event, self._seconds())

        is_live = self._ticker is not None
        if is_live:
            self._refresh()

        # The lines that change show all but notes, and those of a cell are for others to show.
        is_shown_there = is_live and (self._cell is not None or not isinstance(event, Note))
        if line and not is_shown_there and not self._quiet:
            self._console.print(
                one_line(line),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
            return

        assert self._cell is not None, "lines change on a terminal or in a cell"
        with self._lock:
            console = _cell_console()
            console.print(self._panel(), no_wrap=True)
            text = console.export_text(clear=False)
            html = console.export_html(code_format=_CELL_FORMAT, inline_styles=True)
            self._cell.show(text, html)

    def _panel(self) -> RenderableType:
        """The lines as they stand; on a terminal none of them stay at the end."""
        is_ended = self._ended.is_set()
        if is_ended and self._cell is None:
            return ""
        with self._lock:
            return panel(self._progress, self._seconds(), self._console, ended=is_ended)

    def _line(self, event: Event) -> str | None:
        """The plain line of an event; None for those that say nothing by themselves."""
        if isinstance(event, SearchStarted):
            return _search_line(event)
        if isinstance(event, PhaseStarted) and self._progress.search:
            return event.doing  # before a search, an error about wrong input stands alone
        if isinstance(event, PhaseProgressed):
            return self._progress_line(event)
        if isinstance(event, ProbeFinished):
            return self._probe_line(event)
        if isinstance(event, Note):
            return event.text

        return None

    def _probe_line(self, event: ProbeFinished) -> str:
        """What a finished probe came to."""
        search = self._progress.search
        measurement = event.measurement
        label = f"probe {measurement.number + 1}"  # counts on where a search is resumed
        if self._progress.is_verification(event):
            label = f"verifying {label}"
        elif search:
            label += f" of {search.trials}"

        if measurement.fits:
            verdict = f"fits, {rate(measurement)}"
            peak = peak_bytes(measurement)
            if peak:
                verdict += f", {gib(peak)}"
                if search:
                    verdict += f" of {gib(search.budget.device_bytes)}"
                verdict += " GiB"
        elif search:
            verdict = why_not(measurement, search.budget)
        else:
            verdict = OUTCOMES[measurement.outcome]

        if self._progress.is_new_best(event):
            verdict += " (best so far)"
        return f"{label}: {verdict} - {describe(measurement.config)}"

    def _progress_line(self, event: PhaseProgressed) -> str | None:
        """How far a phase has come: now and then, and at once where something fits for the first
        time."""
        now = self._seconds()
        is_first = event.config is not None and not self._has_shown_best
        if now - self._shown_at < _PROGRESS_SECONDS and not is_first:
            return None

        self._shown_at = now
        self._has_shown_best = bool(event.config)
        return progress_line(event)


def _search_line(event: SearchStarted) -> str:
    """What is searched, where, and how much of it can be measured."""
    configs = pluralize(event.space_size, "config")
    if event.refused:
        configs += f", {event.refused:,} of them refused beforehand"

    measured = "none of them can be measured here"
    if event.trials:
        measured = f"at most {pluralize(event.trials, 'probe')}"
    place = where(event.hardware, event.budget)

    return f"{event.model} on {place}: {configs}; {measured}"


def _cell_console() -> Console:
    """A console that records one drawing of a cell."""
    return Terminal(
        file=io.StringIO(),
        record=True,
        width=100,
        height=40,
        force_jupyter=False,
        color_system="truecolor",
    )
