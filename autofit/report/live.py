"""Progress while a search runs: a panel that stays in place on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autofit.core.events import Event, Note, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.measurement import Measurement, Outcome
from autofit.report.words import OUTCOMES, describe, gib, peak_bytes, rate, where, why_not


class LiveDisplay:
    """A context manager and listener: shows the events of a search on a console, which should be that of stderr.

    On a terminal one panel is redrawn and gone at the end; elsewhere every finished probe is one line. `quiet` shows
    nothing at all.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live: Live | None = None
        self._started: SearchStarted | None = None
        self._start = 0.0
        self._probing: dict[int, tuple[ProbeStarted, float]] = {}  # by number, with the time when it began
        self._best: Measurement | None = None
        self._counts: Counter[Outcome] = Counter()
        self._done, self._last = 0, -1

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        line = self._line(event)  # before the event is counted: it tells what the event changes
        self._take(event)
        if self._quiet:
            return
        if self._live is not None:
            self._live.refresh()
        if line and (self._live is None or isinstance(event, Note)):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _take(self, event: Event) -> None:
        if isinstance(event, SearchStarted):
            self._started, self._start = event, time.monotonic()
        elif isinstance(event, ProbeStarted):
            self._probing[event.number] = event, time.monotonic()
        elif isinstance(event, ProbeFinished):
            if not self._verifying(event):
                self._counts[event.measurement.outcome] += 1
                self._count_done(event.measurement.number)
            self._probing.pop(event.measurement.number, None)
            self._best = event.best or self._best

    def _count_done(self, number: int) -> None:
        """Numbers count from before a search was resumed, and the last to begin may be the first to end."""
        self._last = max(self._last, number)
        running = sum(each < self._last and each != number for each in self._probing)
        self._done = max(self._done, self._last + 1 - running)

    def _verifying(self, event: ProbeFinished) -> bool:
        begun = self._probing.get(event.measurement.number)
        return begun is not None and begun[0].verifying

    def _line(self, event: Event) -> str | None:
        """The plain line of an event; None for those that say nothing by themselves."""
        if isinstance(event, SearchStarted):
            place = where(event.hardware, event.budget)
            return f"{event.model} on {place}: {event.space_size:,} configs, at most {event.trials} probes"
        if isinstance(event, ProbeFinished):
            return self._probe_line(event)
        return event.text if isinstance(event, Note) else None

    def _probe_line(self, event: ProbeFinished) -> str:
        measurement = event.measurement
        total = f" of {self._started.trials}" if self._started else ""
        name = f"probe {measurement.number + 1}"  # counts on where a search is resumed
        label = f"verifying {name}" if self._verifying(event) else f"{name}{total}"
        better = event.best is not None and (self._best is None or event.best.config != self._best.config)
        mark = " (best so far)" if better and event.best and event.best.config == measurement.config else ""
        return f"{label}: {self._seen(measurement)}{mark} - {describe(measurement.config)}"

    def _seen(self, measurement: Measurement) -> str:
        """What a probe saw: speed and memory, or why it did not fit."""
        if not measurement.fits:
            return why_not(measurement, self._started.budget) if self._started else OUTCOMES[measurement.outcome]
        peak = peak_bytes(measurement)
        of = f" of {gib(self._started.budget.device_bytes)}" if self._started else ""
        return f"fits, {rate(measurement)}" + (f", {gib(peak)}{of} GiB" if peak else "")

    def _panel(self) -> RenderableType:
        if self._started is None:
            return Text("looking at the model and the device ...", overflow="ellipsis", no_wrap=True)
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(no_wrap=True, style="bold")
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for name, text in self._rows(self._started).items():
            rows.add_row(name, Text(text) if isinstance(text, str) else text)
        return Panel(rows, title=Text(self._started.model), title_align="left")

    def _rows(self, started: SearchStarted) -> dict[str, RenderableType]:
        now = time.monotonic()
        rows: dict[str, RenderableType] = {"on": where(started.hardware, started.budget)}
        probing = tuple(self._probing.values())  # a copy: the panel is redrawn in a thread of its own
        if probing:
            doing = "verifying" if probing[0][0].verifying else "probing"
            rows[doing] = "\n".join(f"{now - since:.0f} s, {describe(event.config)}" for event, since in probing)
        if self._best is not None:
            rows["best"] = f"{rate(self._best)}, {describe(self._best.config)}"
            rows["memory"] = self._memory_bar(self._best, started)
        others = [f"{count} {OUTCOMES[outcome]}" for outcome, count in self._counts.items()]
        rows["probes"] = ", ".join([f"{self._done} of {started.trials}", *others])
        if started.time_limit:
            left = max(0, round(started.time_limit - (now - self._start)))
            rows["time"] = f"{left // 60}:{left % 60:02d} left of {started.time_limit / 60:.3g} min"
        return rows

    def _memory_bar(self, best: Measurement, started: SearchStarted) -> RenderableType:
        peak, total = peak_bytes(best) or 0, started.budget.device_bytes
        words = Text(f"{gib(peak)} of {gib(total)} GiB", overflow="ellipsis", no_wrap=True)
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(total=total, completed=min(peak, total)), words)
        return Group(bar)
