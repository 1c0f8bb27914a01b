"""Progress while a search runs: a few lines that change in place on a terminal and in a notebook, else plain lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Event as Signal
from threading import Thread
from types import TracebackType

from rich.console import Console

from autofit.core.errors import counted
from autofit.core.events import Event, Note, PhaseStarted, ProbeFinished, SearchStarted
from autofit.core.measurement import Measurement
from autofit.report.cell import CellRegion
from autofit.report.formatting import OUTCOMES, describe, gib, peak_bytes, printable, rate, where, why_not
from autofit.report.panel import panel
from autofit.report.progress import Progress
from autofit.report.region import Region

_TICK_SECONDS = 1.0  # the clock shows seconds; drawing takes 1.4 ms of a core that on a CPU is the probes'


class LiveDisplay:
    """A context manager and listener: shows the events of a search on a console, which should be that of stderr.

    On a terminal a few lines change in place and are gone at the end; elsewhere, on a terminal that cannot move its
    cursor and under CI, every phase of the search and every finished probe is one line. `quiet` shows nothing at all.
    In a cell of a notebook the lines change in place, too, and stay at the end; notes are for others to show.
    """

    def __init__(
        self, shown: Console | CellRegion, *, quiet: bool = False, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._cell = shown if isinstance(shown, CellRegion) else None
        self._console = shown.console if isinstance(shown, CellRegion) else shown
        self._quiet = quiet
        self._seconds = seconds
        self._progress = Progress(seconds())
        self._region: Region | CellRegion | None = None
        self._done = Signal()
        self._ticks: Thread | None = None

    def __enter__(self) -> LiveDisplay:
        if not self._quiet and (self._cell or _changes_in_place(self._console)):
            self._region = self._cell or Region(self._console)
            self._region.start()
            self._draw(self._region)
            self._ticks = Thread(target=self._tick, args=(self._region,), name="autofit-display", daemon=True)
            self._ticks.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._ticks is not None:
            self._ticks.join()
        if self._cell is not None:
            self._cell.draw(panel(self._progress, self._seconds(), self._console, ended=True))
        if self._region is not None:
            self._region.stop()
            self._region = None

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        if self._region is None:
            line = self._line(event)  # before the event is taken in: it tells what the event changes
            self._progress.take(event, self._seconds())
            if line and not self._quiet:
                self._print(line)
            return
        with self._region.lock:
            self._progress.take(event, self._seconds())
            if isinstance(event, Note) and self._cell is None:
                self._print(event.text)
            self._draw(self._region)

    def _tick(self, region: Region | CellRegion) -> None:
        while not self._done.wait(_TICK_SECONDS):
            with region.lock:
                if not self._done.is_set():
                    self._draw(region)

    def _draw(self, region: Region | CellRegion) -> None:
        region.draw(panel(self._progress, self._seconds(), self._console))

    def _print(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def _line(self, event: Event) -> str | None:
        """The plain line of an event; None for those that say nothing by themselves."""
        if isinstance(event, SearchStarted):
            place = where(event.hardware, event.budget)
            configs, probes = counted(event.space_size, "config"), counted(event.trials, "probe")
            refused = f", {event.refused:,} of them refused beforehand" if event.refused else ""
            measured = f"at most {probes}" if event.trials else "none of them can be measured here"
            return f"{event.model} on {place}: {configs}{refused}; {measured}"
        if isinstance(event, ProbeFinished):
            return self._probe_line(event)
        if isinstance(event, PhaseStarted):  # before the search begins, wrong input may end it: that is told alone
            return event.doing if self._progress.search else None
        return event.text if isinstance(event, Note) else None

    def _probe_line(self, event: ProbeFinished) -> str:
        measurement, search = event.measurement, self._progress.search
        total = f" of {search.trials}" if search else ""
        name = f"probe {measurement.number + 1}"  # counts on where a search is resumed
        label = f"verifying {name}" if self._progress.verifying(event) else f"{name}{total}"
        mark = " (best so far)" if self._progress.better(event) else ""
        return f"{label}: {self._seen(measurement)}{mark} - {describe(measurement.config)}"

    def _seen(self, measurement: Measurement) -> str:
        """What a probe saw: speed and memory, or why it did not fit."""
        search = self._progress.search
        if not measurement.fits:
            return why_not(measurement, search.budget) if search else OUTCOMES[measurement.outcome]
        peak = peak_bytes(measurement)
        of = f" of {gib(search.budget.device_bytes)}" if search else ""
        return f"fits, {rate(measurement)}" + (f", {gib(peak)}{of} GiB" if peak else "")


def _changes_in_place(console: Console) -> bool:
    """Whether lines can be written over, and somebody watches: logs of CI are read later, whatever they pretend to be.

    FORCE_COLOR makes rich take a pipe for a terminal, which is right for colours only.
    """
    return console.is_interactive and console.file.isatty() and not os.environ.get("CI")
