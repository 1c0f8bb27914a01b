"""What is known of a search that runs, from its events: what goes on now, the best so far, what was seen last.

Kept apart from how it is shown; `panel` draws it, and plain lines are made of it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from autofit.core.events import Event, PhaseStarted, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.measurement import Measurement, Outcome

_REMEMBERED = 8  # of the last measurements; no panel shows more


@dataclass(frozen=True)
class Seen:
    """A measurement that came back; `again` where it was verified."""

    measurement: Measurement
    again: bool


class Progress:
    """Takes in events, each with the time when it came, on whatever clock."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.search: SearchStarted | None = None
        self.search_began = now
        self.phase: tuple[str, float] | None = ("loading PyTorch", now)
        self.probing: dict[int, tuple[ProbeStarted, float]] = {}  # by number, with the time when it began
        self.best: Measurement | None = None
        self.first: Measurement | None = None  # that fitted
        self.bests: list[float] = []  # the most throughput of any leader after each probe; 0 where nothing fitted yet
        self.counts: Counter[Outcome] = Counter()
        self.last: deque[Seen] = deque(maxlen=_REMEMBERED)  # the latest first
        self.done = 0
        self.verified = 0
        self.idle_since = now
        self.side_by_side = 0  # probes at a time, at most so far
        self.expects = False  # whether the peak of any probe was predicted
        self._probes_began = now
        self._highest = -1

    def take(self, event: Event, now: float) -> None:
        """Take in one event."""
        if isinstance(event, PhaseStarted):
            self.phase = event.doing, now
            self.probing.clear()  # an interrupt leaves probes that never came to their end
        elif isinstance(event, SearchStarted):
            self.search, self.search_began = event, now
        elif isinstance(event, ProbeStarted):
            self.phase = None
            if not self.side_by_side:
                self._probes_began = now
            self.probing[event.number] = event, now
            self.side_by_side = max(self.side_by_side, len(self.probing))
            self.expects = self.expects or event.expected_bytes is not None
        elif isinstance(event, ProbeFinished):
            self._finish(event, now)

    def verifying(self, event: ProbeFinished) -> bool:
        """Whether a probe that has just ended was of a finalist."""
        begun = self.probing.get(event.measurement.number)
        return begun is not None and begun[0].verifying

    def better(self, event: ProbeFinished) -> bool:
        """Whether the probe that has just ended is the best so far, and was not before."""
        best = event.best
        new = best is not None and (self.best is None or best.config != self.best.config)
        return new and best is not None and best.config == event.measurement.config

    def seconds_a_probe(self, now: float) -> float | None:
        """At what pace probes have ended, side by side or not; None before two have."""
        count = len(self.bests)
        return (now - self._probes_began) / count if count >= 2 else None

    def _finish(self, event: ProbeFinished, now: float) -> None:
        seen, again = event.measurement, self.verifying(event)
        self.best = event.best or self.best
        self.last.appendleft(Seen(seen, again))
        if again:
            self.verified += 1
        else:
            self.counts[seen.outcome] += 1
            self._count(seen.number)
            leading = self.best.throughput if self.best else 0.0
            self.bests.append(max([leading, *self.bests[-1:]]))  # who leads may change where the machine drifts
            self.first = self.first or (seen if seen.fits else None)
        self.probing.pop(seen.number, None)
        self.idle_since = now

    def _count(self, number: int) -> None:
        """Numbers count from before a search was resumed, and the last to begin may be the first to end."""
        self._highest = max(self._highest, number)
        running = sum(each < self._highest and each != number for each in self.probing)
        self.done = max(self.done, self._highest + 1 - running)
