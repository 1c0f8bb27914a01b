"""The state of a running search, built from its events; `panel` draws it, and `live` turns events into plain lines."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from autofit.core.events import Event, PhaseStarted, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.measurement import Measurement, Outcome


@dataclass(frozen=True)
class Finished:
    """A finished probe; `again` where it verified a finalist."""

    measurement: Measurement
    again: bool


class Progress:
    """Takes in events, each with its time on any one clock."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.search: SearchStarted | None = None
        self.search_began = now
        self.phase: tuple[str, float] | None = ("loading PyTorch", now)
        self.running: dict[int, tuple[ProbeStarted, float]] = {}  # by number, with its start time
        self.best: Measurement | None = None
        self.first: Measurement | None = None  # that fitted
        self.bests: list[float] = []  # the highest throughput of any leader after each probe; 0 before anything fits
        self.counts: Counter[Outcome] = Counter()
        self.latest: deque[Finished] = deque(maxlen=8)  # newest first
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
            self.running.clear()  # interrupted probes never finish
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
        self.latest.appendleft(Finished(measurement, again))
        if again:
            self.verified += 1
        else:
            self.counts[measurement.outcome] += 1
            # Numbers go on where a search is resumed, and of probes side by side the last to start may finish first.
            self._highest = max(self._highest, measurement.number)
            unfinished = sum(number < self._highest and number != measurement.number for number in self.running)
            self.done = max(self.done, self._highest + 1 - unfinished)
            leading = self.best.throughput if self.best else 0.0
            self.bests.append(max([leading, *self.bests[-1:]]))  # the leader may change where the machine drifts
            self.first = self.first or (measurement if measurement.fits else None)
        self.running.pop(measurement.number, None)
        self.idle_since = now
