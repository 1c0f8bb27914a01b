"""A running search on a few lines: what it does, the best so far and its memory, the latest probes, the time. Words say
everything; colours and bars only repeat it. The most important rows come first: a small window cuts the end."""

from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from autofit.core.events import (
    Event,
    PhaseProgressed,
    PhaseStarted,
    ProbeFinished,
    ProbeStarted,
    SearchStarted,
)
from autofit.core.measurement import Measurement, Outcome
from autofit.core.quoting import one_line
from autofit.report import formatting as fmt

_LABEL = 9  # columns of the names at the left
_BAR = 32
_WIDE = (
    70  # columns from which there is room for bars, and for a reason and a few knobs on one line
)
_TALL = 12  # rows from which the title has one
_LATEST = 5  # finished probes shown
_SIDE_BY_SIDE = 4  # running probes shown
_MEMORY = (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY)


class Progress:
    """Takes in events, each with its time on any one clock."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.search: SearchStarted | None = None
        self.search_began = now
        self.phase: tuple[str, float] | None = ("loading PyTorch", now)
        self.progressed: PhaseProgressed | None = None  # of the phase
        self.running: dict[int, tuple[ProbeStarted, float]] = {}  # by number, with its start time
        self.best: Measurement | None = None
        self.first: Measurement | None = None  # that fitted
        # the highest throughput of any leader after each probe; 0 before anything fits
        self.bests: list[float] = []
        self.counts: Counter[Outcome] = Counter()
        # by number and whether it verified, newest last
        self.latest: dict[tuple[int, bool], Measurement] = {}
        self.done = 0
        self.verified = 0
        self.idle_since = now
        self.side_by_side = 0  # the most probes at a time so far
        self.predicts = False  # whether any probe came with a predicted peak
        self._probes_began = now
        self._highest = -1

    def update(self, event: Event, now: float) -> None:
        """Take in one event."""
        if isinstance(event, PhaseStarted):
            self.phase = event.doing, now
            self.progressed = None
            self.running.clear()  # interrupted probes never finish
        elif isinstance(event, PhaseProgressed):
            self.progressed = event
        elif isinstance(event, SearchStarted):
            self.search, self.search_began = event, now
        elif isinstance(event, ProbeStarted):
            self.phase = None
            if not self.side_by_side:
                self._probes_began = now
            self.running[event.number] = event, now
            self.side_by_side = max(self.side_by_side, len(self.running))
            self.predicts = self.predicts or event.expected_bytes is not None
        elif isinstance(event, ProbeFinished):
            self._finish(event, now)

    def is_verification(self, event: ProbeFinished) -> bool:
        """Whether the finished probe measured a finalist again."""
        started = self.running.get(event.measurement.number)
        return started is not None and started[0].verifying

    def is_new_best(self, event: ProbeFinished) -> bool:
        """Whether the finished probe, not yet taken in, becomes the best so far."""
        best = event.best
        if best is None or best.config != event.measurement.config:
            return False
        return self.best is None or self.best.config != best.config

    def seconds_per_probe(self, now: float) -> float | None:
        """The pace of the probes, side by side or not; None before two have finished."""
        count = len(self.bests)
        return (now - self._probes_began) / count if count >= 2 else None

    def _finish(self, event: ProbeFinished, now: float) -> None:
        measurement, again = event.measurement, self.is_verification(event)
        self.best = event.best or self.best
        self.latest.pop((measurement.number, again), None)  # a finalist is verified several times
        self.latest[measurement.number, again] = measurement
        if again:
            self.verified += 1
        else:
            self.counts[measurement.outcome] += 1
            # Numbers go on where a search is resumed, and of probes side by side the last to start may finish first.
            self._highest = max(self._highest, measurement.number)
            unfinished = sum(
                number < self._highest and number != measurement.number for number in self.running
            )
            self.done = max(self.done, self._highest + 1 - unfinished)
            leading = self.best.throughput if self.best else 0.0
            # the leader may change where the machine drifts
            self.bests.append(max([leading, *self.bests[-1:]]))
            self.first = self.first or (measurement if measurement.fits else None)
        self.running.pop(measurement.number, None)
        self.idle_since = now


def panel(
    progress: Progress, now: float, console: Console, *, ended: bool = False
) -> RenderableType:
    """Draw the search as it stands; `ended` leaves out what goes on."""
    search = progress.search
    labels = Column(style="dim", min_width=_LABEL, no_wrap=True, overflow="crop")
    grid = Table.grid(labels, Column(overflow="fold"), padding=(0, 1, 0, 0))
    rows: dict[str, RenderableType | None] = {} if ended else {"now": _now(progress, now, console)}
    if search is not None and search.trials:  # else all is predicted
        rows |= {
            "best": _best(progress),
            "time": Text(_time(progress, now)),
            "memory": _memory(progress, console),
            "probes": _probes(progress, console),
            "progress": _curve(progress.bests, console),
            "latest": _latest(progress, console),
        }
    for label, content in rows.items():
        if content is not None:
            grid.add_row(label, content)
    if search is None or console.height < _TALL:
        return grid
    return Group(
        _one_line(
            f"{search.model} on {fmt.where(search.hardware, search.budget)}", console, "bold"
        ),
        grid,
    )


def _one_line(text: str | Text, console: Console, style: str = "") -> Text:
    """A text that is cut where there is no room for it."""
    line = text if isinstance(text, Text) else Text(one_line(text), style)
    line.no_wrap, line.overflow = True, "crop" if console.options.ascii_only else "ellipsis"
    return line


def _now(progress: Progress, now: float, console: Console) -> Text:
    running = tuple(progress.running.values())
    lines = []
    for event, since in running[:_SIDE_BY_SIDE]:
        again = " again, longer" if event.verifying else ""
        lines += [
            f"measuring probe {event.number + 1}{again}, {fmt.clock(now - since)}",
            fmt.describe(event.config),
        ]
    if not running:
        idle = (
            f"choosing {'what to measure again' if progress.verified else 'the next config'}",
            progress.idle_since,
        )
        doing, since = progress.phase or idle
        lines.append(f"{doing}, {fmt.clock(now - since)}")
        if progress.progressed:
            lines.append(fmt.progress_line(progress.progressed))
    if len(running) > _SIDE_BY_SIDE:
        lines.append(f"and {len(running) - _SIDE_BY_SIDE} more")
    text = Text("\n").join(Text(line) for line in lines)
    if progress.side_by_side > 1:
        _one_line(text, console)
    # As many lines between probes as during them, so that what stands below does not jump.
    most = progress.side_by_side
    usual = 2 * min(most, _SIDE_BY_SIDE) + (most == 1 or most > _SIDE_BY_SIDE)
    used = len(text.wrap(console, max(1, console.width - _LABEL - 2)))
    return text.append("\n" * max(0, usual - used) if progress.search else "")


def _best(progress: Progress) -> Text:
    best, first = progress.best, progress.first
    if best is None:
        return Text("nothing that was measured fits, so far" if progress.done else "none yet")
    gain = best.throughput / first.throughput - 1 if first and first.throughput else 0.0
    faster = f", {fmt.percent(gain)} faster than the first that fitted" if gain >= 0.005 else ""
    speed = (fmt.rate(best), "bold green")
    return Text.assemble(speed, f" (probe {best.number + 1}){faster}\n", fmt.describe(best.config))


def _time(progress: Progress, now: float) -> str:
    assert progress.search, "it has begun"
    elapsed, limit = fmt.clock(now - progress.began), progress.search.time_limit
    pace, more = progress.seconds_per_probe(now), progress.search.trials - progress.done
    if limit is not None:
        left = limit - (now - progress.search_began)
        rest = f"{fmt.clock(left)} left" if left > 0 else "past the limit: still verifying the best"
        return f"{elapsed}, {rest}"
    if any(event.verifying for event, _ in progress.running.values()):
        return f"{elapsed}, verifying what may be the best"
    if pace and more > 0 and not progress.verified and progress.phase is None:
        probes = f"{more} probes" if more > 1 else "probe"
        return f"{elapsed}, about {fmt.about(pace * more)} for the {probes} left, then verifying"
    return elapsed


def _bars(bars: list[tuple[float, str]], console: Console) -> RenderableType:
    """Shares between 0 and 1 in words, drawn where there is room."""
    if console.width < _WIDE:
        return Text("\n".join(words for _, words in bars))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for share, words in bars:
        drawn = (
            ProgressBar(1.0, share, width=_BAR, complete_style="cyan", finished_style="cyan")
            if words
            else ""
        )
        grid.add_row(drawn, Text(words))
    return grid


def _memory(progress: Progress, console: Console) -> RenderableType | None:
    assert progress.search, "there is a budget"
    budget = progress.search.budget.device_bytes
    peak = fmt.peak_bytes(progress.best) if progress.best else None
    bars = [(peak / budget, f"best {fmt.gib(peak)} of {fmt.gib(budget)} GiB")] if peak else []
    if progress.predicts:
        largest = max(
            (event.expected_bytes or 0 for event, _ in progress.running.values()), default=0
        )
        bars.append((largest / budget, f"now {fmt.gib(largest)} GiB expected" if largest else ""))
    return _bars(bars, console) if bars else None


def _probes(progress: Progress, console: Console) -> RenderableType:
    assert progress.search, "there is a number of probes"
    most = max(progress.search.trials, progress.done)
    words = {**fmt.OUTCOMES, Outcome.FITS: "fit"}
    counts = ", ".join(f"{count} {words[outcome]}" for outcome, count in progress.counts.items())
    bar = _bars([(progress.done / most, f"{progress.done} of at most {most}")], console)
    return Group(bar, Text(counts)) if counts else bar


def _curve(bests: list[float], console: Console) -> Text | None:
    """The best so far after each probe, as columns of eight heights; None before it has risen."""
    rates = [rate for rate in bests if rate]
    if len(set(rates)) < 2 or console.options.ascii_only:
        return None
    columns = min(len(bests), max(1, console.width - _LABEL - 2))
    sampled = [bests[len(bests) * (column + 1) // columns - 1] for column in range(columns)]
    low, span = min(rates), max(rates) - min(rates)
    return Text(
        "".join(chr(0x2581 + round((rate - low) / span * 7)) if rate else " " for rate in sampled)
    )


def _latest(progress: Progress, console: Console) -> Text | None:
    newest = list(reversed(progress.latest.items()))[:_LATEST]
    if not newest:
        return None
    text = Text("\n").join(_finished(one, again, progress) for (_, again), one in newest)
    return _one_line(text, console) if console.width >= _WIDE else text


def _finished(one: Measurement, again: bool, progress: Progress) -> Text:
    """A measurement against the best, and what its config has instead."""
    best = progress.best
    assert progress.search, "it has begun"
    style = ""
    if not one.fits:
        in_memory = one.outcome in _MEMORY
        style = "yellow" if in_memory else "red"
        verdict = (
            fmt.why_not(one, progress.search.budget) if in_memory else fmt.OUTCOMES[one.outcome]
        )
    elif again or best is None or not best.throughput:
        verdict = fmt.rate(one)
    elif one.config == best.config:
        verdict = f"{fmt.rate(one)}, the best so far"
    else:
        ratio = one.throughput / best.throughput
        verdict = f"{fmt.percent(1 - ratio)} slower" if ratio < 0.995 else "as fast as the best"
    other = fmt.instead(one.config, best)
    joint = f"{'' if one.fits else ','} with {other}" if other else ""
    return Text.assemble(
        f"probe {one.number + 1}{' again' if again else ''}: ", (verdict, style), (joint, "dim")
    )
