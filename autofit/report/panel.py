"""A running search on a few lines: what goes on, the best so far and its memory, what was seen last, the time.

Everything is said in words; colour and pictures only repeat it. What matters least is left out where there is no room.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from autofit.core.measurement import Measurement, Outcome
from autofit.report.formatting import (
    OUTCOMES,
    about,
    clock,
    describe,
    gib,
    instead,
    peak_bytes,
    percent,
    printable,
    rate,
    where,
    why_not,
)
from autofit.report.progress import Progress, Seen

_LABEL = 10  # columns of the names at the left
_WIDEST_BAR = 32
_LAST = 5  # of the measurements
_SIDE_BY_SIDE = 4  # of probes at a time
_MEMORY = (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY)


def panel(seen: Progress, now: float, console: Console, *, ended: bool = False) -> list[Text]:
    """The lines: narrower than the console, and fewer than its rows; `ended`: nothing goes on."""
    paper = _Paper(console)
    height = max(0, console.height - 2)  # for the cursor, and a line of what was there before
    doing = [] if ended else _now(seen, now, paper)
    if seen.search is None:
        return doing[:height]
    title = Text(printable(f"{seen.search.model} on {where(seen.search.hardware, seen.search.budget)}"), "bold")
    if not seen.search.trials:  # all is predicted
        return [paper.cut(title), *doing][:height]
    # As they stand on the screen, each with its rank among those that are worth a line.
    parts = [
        (10, [Text()]),
        (4, [paper.cut(title)]),
        (1, doing),
        (8, [] if ended else [Text()] * (_usual(seen) - len(doing))),  # so that what stands below does not jump
        (2, _best(seen, paper)),
        (5, _memory(seen, paper)),
        (7, _curve(seen, paper)),
        (6, _probes(seen, paper)),
        (3, _time(seen, now, paper)),
        (9, _last(seen, paper)),
    ]
    room = dict.fromkeys(range(len(parts)), 0)
    for place in sorted(room, key=lambda each: parts[each][0]):
        room[place] = min(len(parts[place][1]), max(0, height - sum(room.values())))
    return [line for place, (_, lines) in enumerate(parts) for line in lines[: room[place]]]


class _Paper:
    """How wide a line may be, and what signs there are to draw with."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = max(1, console.width - 1)  # a terminal may break a line that fills it
        self._room = max(1, self._width - _LABEL)
        self.roomy = self._room >= 60  # for a reason and a few knobs on one line
        self._pictures = not console.options.ascii_only

    def rows(self, label: str, *texts: Text, most: int = 2) -> list[Text]:
        """A name, and what is to be said of it: each text on at most so many lines."""
        lines = [line for text in texts for line in self._wrapped(text, most)]
        heads = [label, *[""] * (len(lines) - 1)]
        return [
            self.cut(Text.assemble((f"{head:{_LABEL}}", "dim"), line)) for head, line in zip(heads, lines, strict=True)
        ]

    def cut(self, line: Text, width: int | None = None) -> Text:
        """What there is room for, and three dots where that is not all."""
        width = self._width if width is None else width
        if line.cell_len > width:
            line.truncate(max(1, width - 3))
            line.rstrip()
            line.append("..."[: max(0, width - line.cell_len)])
        return line

    def bar(self, share: float, words: str) -> Text:
        """A share, in words and, where there is room for it, drawn."""
        full, empty = ("\u2588", "\u2591") if self._pictures else ("#", "-")
        length = min(_WIDEST_BAR, self._room - cell_len(words) - 2)
        if length < 4:
            return Text(words)
        filled = min(length, max(1, round(share * length))) if share > 0 else 0
        return Text.assemble(full * filled, (empty * (length - filled), "dim"), "  ", words)

    def curve(self, figures: Sequence[float]) -> str:
        """Figures that never fall, as columns of eight heights; blank where there is none yet."""
        known = [each for each in figures if each]
        if not self._pictures or len(set(known)) < 2:
            return ""
        columns = min(len(figures), self._room)
        shown = [figures[len(figures) * (place + 1) // columns - 1] for place in range(columns)]
        span = max(known) - min(known)
        return "".join(chr(0x2581 + round((each - min(known)) / span * 7)) if each else " " for each in shown)

    def _wrapped(self, text: Text, most: int) -> list[Text]:
        lines = list(text.wrap(self._console, self._room)) or [text]
        for line in lines:
            line.rstrip()
        if len(lines) > most:
            lines[most - 1] = self.cut(Text(" ").join(lines[most - 1 :]), self._room)
        return lines[:most]


def _now(seen: Progress, now: float, paper: _Paper) -> list[Text]:
    running = tuple(seen.probing.values())
    texts = []
    for event, since in running[:_SIDE_BY_SIDE]:
        again = " again, longer" if event.verifying else ""
        texts += [
            Text(f"measuring probe {event.number + 1}{again}, {clock(now - since)}"),
            Text(describe(event.config)),
        ]
    if not running:
        what = "what to measure again" if seen.verified else "the next config"
        doing, since = seen.phase or (f"choosing {what}", seen.idle_since)
        texts.append(Text(f"{doing}, {clock(now - since)}"))
    more = len(running) - _SIDE_BY_SIDE
    texts += [Text(f"and {more} more")] if more > 0 else []
    return paper.rows("now", *texts, most=2 if seen.side_by_side <= 1 else 1)


def _usual(seen: Progress) -> int:
    """How many lines it takes to say what goes on, as many probes as there were at a time."""
    most = seen.side_by_side
    return 2 * min(most, _SIDE_BY_SIDE) + (most == 1 or most > _SIDE_BY_SIDE)


def _best(seen: Progress, paper: _Paper) -> list[Text]:
    best, first = seen.best, seen.first
    if best is None:
        return paper.rows("best", Text("none yet" if not seen.done else "nothing that was measured fits, so far"))
    faster = best.throughput / first.throughput - 1 if first and first.throughput else 0.0
    told = [f", {percent(faster)} faster than the first that fitted"] if faster >= 0.005 else []
    speed = Text.assemble((rate(best), "bold green"), f" (probe {best.number + 1})", *told)
    return [*paper.rows("best", speed, most=1), *paper.rows("", Text(describe(best.config)))]


def _memory(seen: Progress, paper: _Paper) -> list[Text]:
    assert seen.search, "there is a budget"
    budget = seen.search.budget.device_bytes
    peak = peak_bytes(seen.best) if seen.best else None
    lines = [paper.bar(peak / budget, f"best {gib(peak)} of {gib(budget)} GiB")] if peak else []
    if seen.expects:
        expected = [each.expected_bytes for each, _ in seen.probing.values() if each.expected_bytes]
        largest = max(expected, default=0)
        lines.append(paper.bar(largest / budget, f"now {gib(largest)} GiB expected") if largest else Text())
    return paper.rows("memory", *lines, most=1) if lines else []


def _curve(seen: Progress, paper: _Paper) -> list[Text]:
    drawn = paper.curve(seen.bests)
    return paper.rows("progress", Text(drawn), most=1) if drawn.strip() else []


def _probes(seen: Progress, paper: _Paper) -> list[Text]:
    assert seen.search, "there is a number of probes"
    most = max(seen.search.trials, seen.done)
    found = [f"{count} {'fit' if what is Outcome.FITS else OUTCOMES[what]}" for what, count in seen.counts.items()]
    told = [paper.bar(seen.done / most if most else 0.0, f"{seen.done} of at most {most}")]
    return paper.rows("probes", *told, *([Text(", ".join(found))] if found else []), most=1)


def _time(seen: Progress, now: float, paper: _Paper) -> list[Text]:
    assert seen.search, "it has begun"
    told, limit = clock(now - seen.began), seen.search.time_limit
    pace, more = seen.seconds_a_probe(now), seen.search.trials - seen.done
    if limit is not None:
        left = limit - (now - seen.search_began)
        told += f", {clock(left)} left" if left > 0 else ", past the limit: what may be the best is still verified"
    elif any(event.verifying for event, _ in seen.probing.values()):
        told += ", verifying what may be the best"
    elif pace and more > 0 and not seen.verified and seen.phase is None:
        probes = f"{more} probes" if more > 1 else "probe"
        told += f", about {about(pace * more)} for the {probes} left, then verifying"
    return paper.rows("time", Text(told))


def _last(seen: Progress, paper: _Paper) -> list[Text]:
    latest = {(each.measurement.number, each.again): each for each in reversed(seen.last)}  # of several again's
    order = sorted(latest.values(), key=seen.last.index)
    texts = [_told(each, seen) for each in order[:_LAST]]
    return paper.rows("last", *texts, most=1 if paper.roomy else 2) if texts else []


def _told(each: Seen, seen: Progress) -> Text:
    """How a measurement stands to the best, and what its config has instead."""
    one, best = each.measurement, seen.best
    assert seen.search, "it has begun"
    name = f"probe {one.number + 1}{' again' if each.again else ''}: "
    if not one.fits:
        style = "yellow" if one.outcome in _MEMORY else "red"
        verdict = Text(why_not(one, seen.search.budget) if one.outcome in _MEMORY else OUTCOMES[one.outcome], style)
    elif each.again:
        verdict = Text(rate(one))
    else:
        verdict = Text(_against(one, best))
    other = instead(one.config, best)
    joint = " with" if one.fits else ", with"
    return Text(name) + verdict + Text(f"{joint} {other}" if other else "", "dim")


def _against(one: Measurement, best: Measurement | None) -> str:
    if best is None or not best.throughput:
        return rate(one)
    if one.config == best.config:
        return f"{rate(one)}, the best so far"
    ratio = one.throughput / best.throughput
    return f"{percent(1 - ratio)} slower" if ratio < 0.995 else "as fast as the best"
