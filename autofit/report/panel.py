"""A running search on a few lines: what it does, the best so far and its memory, the latest probes,
the time.

Words say everything; colours and bars only repeat it. The most important rows come first: a small
window cuts the end.
"""

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
# columns from which there is room for bars, and for a reason and a few knobs on one line
_WIDE = 70
_TALL = 12  # rows from which the title has one
_LATEST = 5  # finished probes shown
_LOWEST = 0x2581  # the lowest of eight blocks that a column of a curve may be
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
            self.phase = (event.doing, now)
            self.progressed = None
            self.running.clear()  # interrupted probes never finish
        elif isinstance(event, PhaseProgressed):
            self.progressed = event
        elif isinstance(event, SearchStarted):
            self.search = event
            self.search_began = now
        elif isinstance(event, ProbeStarted):
            self.phase = None
            if not self.side_by_side:
                self._probes_began = now
            self.running[event.number] = (event, now)
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
        if count < 2:
            return None

        return (now - self._probes_began) / count

    def _finish(self, event: ProbeFinished, now: float) -> None:
        """Take in the measurement of a probe."""
        measurement = event.measurement
        again = self.is_verification(event)
        key = (measurement.number, again)
        self.best = event.best or self.best
        self.latest.pop(key, None)  # a finalist is verified several times
        self.latest[key] = measurement
        self.running.pop(measurement.number, None)
        self.idle_since = now
        if again:
            self.verified += 1
            return

        self.counts[measurement.outcome] += 1
        if measurement.fits and self.first is None:
            self.first = measurement

        # Numbers go on where a search is resumed, and of probes side by side the last to start may
        # finish first.
        self._highest = max(self._highest, measurement.number)
        unfinished = sum(number < self._highest for number in self.running)
        self.done = max(self.done, self._highest + 1 - unfinished)

        # the leader may change where the machine drifts
        leading = self.best.throughput if self.best else 0.0
        self.bests.append(max([leading, *self.bests[-1:]]))


def panel(
    progress: Progress,
    now: float,
    console: Console,
    *,
    ended: bool = False,
) -> RenderableType:
    """Draw the search as it stands; `ended` leaves out what goes on."""
    rows: dict[str, RenderableType | None] = {}
    if not ended:
        rows["now"] = _now(progress, now, console)

    search = progress.search
    if search is not None and search.trials:  # else all is predicted
        rows["best"] = _best(progress)
        rows["time"] = Text(_time(progress, search, now))
        rows["memory"] = _memory(progress, search, console)
        rows["probes"] = _probes(progress, search, console)
        rows["progress"] = _curve(progress.bests, console)
        rows["latest"] = _latest(progress, search, console)

    labels = Column(
        style="dim",
        min_width=_LABEL,
        no_wrap=True,
        overflow="crop",
    )
    grid = Table.grid(labels, Column(overflow="fold"), padding=(0, 1, 0, 0))
    for label, content in rows.items():
        if content is not None:
            grid.add_row(label, content)

    if search is None or console.height < _TALL:
        return grid

    title = one_line(f"{search.model} on {fmt.where(search.hardware, search.budget)}")
    return Group(_cut(Text(title, "bold"), console), grid)


def _cut(text: Text, console: Console) -> Text:
    """A text whose lines are cut where there is no room for them."""
    text.no_wrap = True
    text.overflow = "crop" if console.options.ascii_only else "ellipsis"

    return text


def _now(progress: Progress, now: float, console: Console) -> Text:
    """The running probes, or else what goes on between them."""
    running = list(progress.running.values())
    lines = []
    for event, since in running[:_SIDE_BY_SIDE]:
        doing = f"measuring probe {event.number + 1}"
        if event.verifying:
            doing += " again, longer"
        lines += [f"{doing}, {fmt.clock(now - since)}", fmt.describe(event.config)]

    more = len(running) - _SIDE_BY_SIDE
    if more > 0:
        lines.append(f"and {more} more")

    if not running:
        doing = "choosing the next config"
        since = progress.idle_since
        if progress.phase:
            doing, since = progress.phase
        elif progress.verified:
            doing = "choosing what to measure again"

        lines.append(f"{doing}, {fmt.clock(now - since)}")
        if progress.progressed:
            lines.append(fmt.progress_line(progress.progressed))

    text = Text("\n").join(map(Text, lines))
    most = progress.side_by_side
    if most > 1:
        _cut(text, console)

    # As many lines between probes as during them, so that what stands below does not jump.
    if progress.search:
        usual = 2 * min(most, _SIDE_BY_SIDE)
        if most == 1 or most > _SIDE_BY_SIDE:
            usual += 1
        used = len(text.wrap(console, _room(console)))
        text.append("\n" * max(0, usual - used))

    return text


def _room(console: Console) -> int:
    """The columns beside the names at the left."""
    return max(1, console.width - _LABEL - 2)


def _best(progress: Progress) -> Text:
    """The leader's speed, its gain, and its config."""
    best = progress.best
    if best is None and progress.done:
        return Text("nothing that was measured fits, so far")
    if best is None:
        return Text("none yet")

    about = f" (probe {best.number + 1})"
    first = progress.first
    if first and first.throughput:
        gain = best.throughput / first.throughput - 1
        if gain >= 0.005:
            about += f", {fmt.percent(gain)} faster than the first that fitted"

    speed = (fmt.rate(best), "bold green")
    return Text.assemble(speed, f"{about}\n", fmt.describe(best.config))


def _time(progress: Progress, search: SearchStarted, now: float) -> str:
    """How long it has run, and how long it will, as far as that is known."""
    elapsed = fmt.clock(now - progress.began)
    if search.time_limit is not None:
        left = progress.search_began + search.time_limit - now
        if left > 0:
            return f"{elapsed}, {fmt.clock(left)} left"
        return f"{elapsed}, past the limit: still verifying the best"

    if any(event.verifying for event, _ in progress.running.values()):
        return f"{elapsed}, verifying what may be the best"

    pace = progress.seconds_per_probe(now)
    more = search.trials - progress.done
    is_exploring = progress.phase is None and not progress.verified
    if not pace or more <= 0 or not is_exploring:
        return elapsed

    probes = "probe"
    if more > 1:
        probes = f"{more} probes"
    left = pace * more

    return f"{elapsed}, about {fmt.about(left)} for the {probes} left, then verifying"


def _bars(bars: list[tuple[float, str]], console: Console) -> RenderableType:
    """Shares between 0 and 1 in words, drawn where there is room."""
    if console.width < _WIDE:
        return Text("\n".join(words for _, words in bars))

    grid = Table.grid(padding=(0, 2, 0, 0))
    for share, words in bars:
        drawn: RenderableType = ""
        if words:
            drawn = ProgressBar(
                1.0,
                share,
                width=_BAR,
                complete_style="cyan",
                finished_style="cyan",
            )

        grid.add_row(drawn, Text(words))

    return grid


def _memory(progress: Progress, search: SearchStarted, console: Console) -> RenderableType | None:
    """The peak of the best, and the largest that is expected of the running probes, against the
    budget."""
    budget = search.budget.device_bytes
    bars = []
    peak = None
    if progress.best:
        peak = fmt.peak_bytes(progress.best)
    if peak:
        words = f"best {fmt.gib(peak)} of {fmt.gib(budget)} GiB"
        bars.append((peak / budget, words))

    if progress.predicts:
        running = progress.running.values()
        largest = max((event.expected_bytes or 0 for event, _ in running), default=0)
        words = ""  # no bar, either
        if largest:
            words = f"now {fmt.gib(largest)} GiB expected"
        bars.append((largest / budget, words))

    if not bars:
        return None
    return _bars(bars, console)


def _probes(progress: Progress, search: SearchStarted, console: Console) -> RenderableType:
    """How many probes are done, and with what outcomes."""
    most = max(search.trials, progress.done)
    bar = _bars([(progress.done / most, f"{progress.done} of at most {most}")], console)

    counts = []
    for outcome, count in progress.counts.items():
        word = fmt.OUTCOMES[outcome]
        if outcome is Outcome.FITS:
            word = "fit"
        counts.append(f"{count} {word}")

    if not counts:
        return bar

    return Group(bar, Text(", ".join(counts)))


def _curve(bests: list[float], console: Console) -> Text | None:
    """The best so far after each probe, as columns of eight heights; None before it has risen."""
    rates = [rate for rate in bests if rate]
    if len(set(rates)) < 2 or console.options.ascii_only:
        return None

    columns = min(len(bests), _room(console))
    low = min(rates)
    span = max(rates) - low
    curve = ""
    for column in range(1, columns + 1):
        last = len(bests) * column // columns
        rate = bests[last - 1]
        sign = " "
        if rate:
            height = round((rate - low) / span * 7)
            sign = chr(_LOWEST + height)

        curve += sign

    return Text(curve)


def _latest(progress: Progress, search: SearchStarted, console: Console) -> Text | None:
    """The latest measurements, a line each; None before there is one."""
    newest = list(reversed(progress.latest.items()))[:_LATEST]
    if not newest:
        return None

    lines = []
    for (_, again), measurement in newest:
        line = _finished(measurement, again, progress.best, search)
        lines.append(line)

    text = Text("\n").join(lines)
    if console.width >= _WIDE:
        _cut(text, console)
    return text


def _finished(
    measurement: Measurement,
    again: bool,
    best: Measurement | None,
    search: SearchStarted,
) -> Text:
    """A measurement against the best, and what its config has instead."""
    label = f"probe {measurement.number + 1}"
    if again:
        label += " again"

    style = ""
    verdict = fmt.rate(measurement)
    if measurement.outcome in _MEMORY:
        style = "yellow"
        verdict = fmt.why_not(measurement, search.budget)
    elif not measurement.fits:
        style = "red"
        verdict = fmt.OUTCOMES[measurement.outcome]
    elif best and best.throughput and not again:
        ratio = measurement.throughput / best.throughput
        if measurement.config == best.config:
            verdict += ", the best so far"
        elif ratio < 0.995:
            verdict = f"{fmt.percent(1 - ratio)} slower"
        else:
            verdict = "as fast as the best"

    joint = ""
    other = fmt.instead(measurement.config, best)
    if other and measurement.fits:
        joint = f" with {other}"
    elif other:
        joint = f", with {other}"

    return Text.assemble(f"{label}: ", (verdict, style), (joint, "dim"))
