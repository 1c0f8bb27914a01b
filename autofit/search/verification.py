"""Verification: the finalists of a search are measured again, longer and in turn, before anyone
sees them.

Short measurements that are too good by chance rank first. So finalists are chosen by the posterior
given all measurements, not by each one's own; the winner is chosen by the verified measurements
alone.
"""

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autofit.core.config import Config
from autofit.core.measurement import Measurement, StepSeconds
from autofit.core.result import of_tier, tier
from autofit.search.drift import step_times
from autofit.search.ranking import Measurements, Ranking

# Of the recommended one and its rivals, A, B, A, B: a disturbance of the machine affects all.
ROUNDS = 2
MOST_ROUNDS = 3  # while the leader is in doubt; on recorded tables half of what two rounds missed
FIELD = 3  # finalists measured in turn
MOST = 5  # finalists in all, but for those of tiers that none of these is of
OF_TIER = 2  # finalists of each tier
_TRIES = 3  # of a tier

_NOISE = 0.018  # expected of one run, in logarithms
_RUNS = 3  # degrees of freedom that this counts for
# A config expected to be slower than the first by more than the tolerance and this is no finalist.
# On recorded tables (benchmarks.replay) fields of 3, 4 and 6 that were 8 % wide found the same, and
# one of 2 missed a little.
_DOUBT = 0.05
# By so much a machine may have slowed down since it explored. On recorded tables, with finals 10 %
# slower, to call up whatever was faster when explored took a sixth more finals, and changed no
# answer.
_SLOWER = 0.15
# Also this where exploring had fewer cores: an assumption, since the order may differ there.
_ELSEWHERE = 0.1
# One-sided 95 % quantiles of Student's t by degrees of freedom, from 3.
_T95 = (2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)

Rounds = dict[Config, list[Measurement]]  # the measurements of each finalist
Measure = Callable[[Measurement], Measurement | None]


class _NoTimeError(Exception):
    """There is no time for more."""


@dataclass(frozen=True)
class Verification:
    """What verification came to.

    Attributes:
        explored: the measurements that exploring made.
        verified: one measurement of each config that fitted again.
        failed: the configs that did not.
        interrupted: whether by Ctrl-C.
        out_of_time: whether the time was up before its end.
    """

    explored: tuple[Measurement, ...]
    verified: tuple[Measurement, ...] = ()
    failed: tuple[Config, ...] = ()
    interrupted: bool = False
    out_of_time: bool = False

    def candidates(self) -> tuple[Measurement, ...]:
        """The measurements to choose the best from: the verified; the explored if an interrupt, or
        the time, left no others."""
        if self.verified or not (self.interrupted or self.out_of_time):
            return self.verified
        return tuple(seen for seen in self.explored if seen.config not in self.failed)

    def of_tiers(self, *, elsewhere: bool) -> tuple[Measurement, ...]:
        """The measurements to choose the best of each tier from.

        The verified, and the explored of tiers of which nothing was verified, unless they ran
        elsewhere and cannot be compared with verified ones.
        """
        if elsewhere and self.verified:
            return self.verified

        done = {tier(seen.config) for seen in self.verified}
        explored = [seen for seen in self.latest() if tier(seen.config) not in done]
        return (*self.verified, *explored)

    def latest(self) -> tuple[Measurement, ...]:
        """Of every config that fits, its latest measurement."""
        latest = {}
        for measurement in (*self.explored, *self.verified):
            if measurement.fits and measurement.config not in self.failed:
                latest[measurement.config] = measurement
        return tuple(latest.values())


def verify(
    explored: Measurements,
    posterior: Measurements,
    measure: Measure,
    ranking: Ranking,
    *,
    seconds_left: Callable[[], float] = lambda: math.inf,
    elsewhere: bool = False,
    before: Measurements = (),
    finished: bool = False,
) -> Verification:
    """Measure the possible winners again; then, of each other tier, the best and a rival close to
    it, once.

    The winners are at least the best and the runner-up, and the next one for each that fails or
    turns out much slower than a config that was only explored. Once something is verified, nothing is
    measured that is expected to take longer than there is time.

    Args:
        posterior: one measurement of every config that fits, at its expected speed.
        measure: measures a finalist, longer and in a fresh process; None where the time was up
            first.
        ranking: which of them to recommend.
        seconds_left: until the end of the time for all of this.
        elsewhere: whether `measure` has more cores than exploring probes: more configs may win
            there, and explored measurements cannot be compared with verified ones.
        before: what `measure` gave in a process that was killed, in order: none of it is measured
            again.
        finished: whether that process came to the end of this, so that nothing more is measured.
    """
    waiting = ranking.finalists(posterior)
    verified: list[Measurement] = []
    failed: list[Config] = []
    rounds: Rounds = {}
    took: list[float] = []  # seconds of each
    known = _by_config(before)

    def measure_in_time(finalist: Measurement) -> Measurement:
        if known[finalist.config]:
            seen: Measurement | None = known[finalist.config].pop(0)
        else:
            has_answer = bool(verified or passed(rounds, 1))
            if finished or (has_answer and seconds_left() < max(took)):
                raise _NoTimeError
            seen = measure(finalist)

        if seen is None:
            raise _NoTimeError

        took.append(seen.seconds)
        return seen

    def keep_measured() -> None:
        """What passed, if only in one round, and what failed."""
        verified.extend(passed(rounds, 1))
        failed.extend(config for config, own in rounds.items() if own and not own[-1].fits)

    def in_turn(finalists: Measurements) -> None:
        """Measure each once more, never alive together; one that fails is not tried again."""
        for finalist in finalists:
            own = rounds[finalist.config]
            if not own or own[-1].fits:
                own.append(measure_in_time(finalist))

    interrupted = False
    out_of_time = False
    try:
        while called := _next_finalists(waiting, verified, ranking, elsewhere=elsewhere):
            waiting = [finalist for finalist in waiting if finalist not in called]
            rounds = {finalist.config: [] for finalist in called}
            in_turn(called[:2])
            if len(called) > 2:  # the answer is verified before all of the field is measured
                in_turn(_best_once_more(called[:2], rounds, ranking))
                in_turn(called[2:])
            while again := _next_round(called, rounds, ranking):
                in_turn(again)
            keep_measured()

        while called := _of_tiers(posterior, waiting, verified, failed, ranking):
            waiting = [finalist for finalist in waiting if finalist not in called]
            rounds = {finalist.config: [] for finalist in called}
            in_turn(called)
            keep_measured()
    except _NoTimeError:
        out_of_time = True
        keep_measured()
    except KeyboardInterrupt:
        interrupted = True
        verified.extend(passed(rounds))

    return Verification(
        tuple(explored),
        tuple(verified),
        tuple(failed),
        interrupted,
        out_of_time,
    )


def confirm(
    explored: Measurements,
    posterior: Measurements,
    measure: Measure,
    ranking: Ranking,
    *,
    before: Measurements = (),
) -> Verification:
    """Measure the one to recommend once more, or the next one for each that fails.

    Arguments are those of `verify`.
    """
    verified = []
    failed = []
    interrupted = False
    out_of_time = False
    known = _by_config(before)
    try:
        for finalist in ranking.finalists(posterior)[:MOST]:
            earlier = known[finalist.config]
            seen = earlier.pop(0) if earlier else measure(finalist)
            if seen is None:
                out_of_time = True
                break
            if seen.fits:
                verified.append(joined([seen]))
                break
            failed.append(finalist.config)
    except KeyboardInterrupt:
        interrupted = True

    return Verification(
        tuple(explored),
        tuple(verified),
        tuple(failed),
        interrupted,
        out_of_time,
    )


def _by_config(measurements: Measurements) -> Rounds:
    """In their order; a config that was not measured has none."""
    rounds: Rounds = defaultdict(list)
    for measurement in measurements:
        rounds[measurement.config].append(measurement)

    return rounds


def passed(rounds: Rounds, enough: int = ROUNDS) -> list[Measurement]:
    """One measurement of each finalist that fitted in all of its rounds, if those are enough."""
    return [joined(own) for own in rounds.values() if len(own) >= enough and own[-1].fits]


def joined(rounds: Measurements) -> Measurement:
    """One verified measurement of several rounds.

    It has the mean of their medians, the widest interval and the highest peak.
    """
    medians = []
    lows = []
    highs = []
    peaks = []
    for measurement in rounds:
        if measurement.step_seconds:
            medians.append(measurement.step_seconds.median)
            lows.append(measurement.step_seconds.low)
            highs.append(measurement.step_seconds.high)
        if measurement.peak_bytes:
            peaks.append(measurement.peak_bytes)

    median = sum(medians) / len(medians)
    return dataclasses.replace(
        rounds[-1].taking(median),
        step_seconds=StepSeconds(median, min(lows), max(highs)),
        peak_bytes=max(peaks, key=lambda peak: peak.reserved or peak.allocated),
        seconds=sum(measurement.seconds for measurement in rounds),
        steps=sum(measurement.steps for measurement in rounds),
        verified=True,
    )


def _next_finalists(
    waiting: Measurements, verified: Measurements, ranking: Ranking, *, elsewhere: bool
) -> Measurements:
    """The next to measure: the first field, a missing runner-up, or a config expected to beat all
    verified ones. Elsewhere no config is expected to."""
    if not verified:
        if elsewhere:
            return _field(waiting, ranking, _DOUBT + _ELSEWHERE, MOST)
        return _field(waiting, ranking, _DOUBT, FIELD)

    if len(verified) < 2:
        return waiting[:1]

    if elsewhere or len(verified) >= MOST:
        return []

    to_beat = max(map(ranking.value, verified)) * (1 + ranking.tolerance + _SLOWER)
    for finalist in waiting:
        if ranking.value(finalist) > to_beat:
            return [finalist]

    return []


def _of_tiers(
    posterior: Measurements,
    waiting: Measurements,
    verified: Measurements,
    failed: Sequence[Config],
    ranking: Ranking,
) -> Measurements:
    """The next to measure of a tier: its best, and a rival that is close to it, so that no tier is
    named by one probe. None of a tier that failed too often."""
    done = Counter(tier(seen.config) for seen in verified)
    tries = Counter(map(tier, failed))
    for name in dict.fromkeys(tier(finalist.config) for finalist in waiting):
        if tries[name] >= _TRIES or done[name] >= OF_TIER:
            continue

        candidates = of_tier(name, waiting)
        rivals = _close(candidates, of_tier(name, posterior), ranking, _DOUBT)
        if not done[name] and not rivals:
            return candidates[:1]
        if rivals:
            return rivals[: OF_TIER - done[name]]

    return []


def _field(
    waiting: Measurements,
    ranking: Ranking,
    doubt: float,
    most: int,
) -> Measurements:
    """The first finalists.

    The first two, and others that are within the tolerance and the doubt of the best.
    """
    close = _close(waiting[2:], waiting, ranking, doubt)
    return [*waiting[:2], *close][:most]


def _close(
    some: Measurements,
    others: Measurements,
    ranking: Ranking,
    doubt: float,
) -> Measurements:
    """Those that are within the tolerance and the doubt of the best of the others."""
    enough = max(map(ranking.value, others), default=0.0) * (1 - ranking.tolerance - doubt)
    return [finalist for finalist in some if ranking.value(finalist) >= enough]


def _next_round(
    called: Measurements,
    rounds: Rounds,
    ranking: Ranking,
) -> Measurements:
    """Next to measure again: leading candidates with the fewest rounds, else the recommended one
    until ROUNDS."""
    by_count: dict[int, list[Measurement]] = defaultdict(list)
    for finalist in _in_doubt(called, rounds, ranking.tolerance):
        by_count[len(rounds[finalist.config])].append(finalist)

    fewest = min(by_count, default=MOST_ROUNDS)
    if fewest < MOST_ROUNDS:
        return by_count[fewest]
    return _best_once_more(called, rounds, ranking)


def _best_once_more(
    called: Measurements,
    rounds: Rounds,
    ranking: Ranking,
) -> Measurements:
    """The one to recommend, unless it had enough rounds."""
    measured = {finalist.config: rounds[finalist.config] for finalist in called}
    best = ranking.recommend(passed(measured, 1))
    return [best] if best and len(rounds[best.config]) < ROUNDS else []


def _in_doubt(
    called: Measurements,
    rounds: Rounds,
    tolerance: float,
) -> Measurements:
    """The leader and those that may, at 95 %, be faster than it by more than the tolerance; empty
    without the latter.

    By Student's t with the variance pooled over all rounds and what is expected of it, in
    logarithms: a machine's noise is a share of the time.
    """
    freedom = 0
    squares = 0.0
    counts = {}
    means = {}
    for config, own in rounds.items():
        if not own[-1].fits:
            continue

        _, seconds = step_times(own)
        logarithms = list(map(math.log, seconds))
        count = len(logarithms)
        counts[config] = count
        means[config] = statistics.fmean(logarithms)
        freedom += count - 1
        squares += statistics.pvariance(logarithms) * count

    if len(means) < 2:
        return []

    variance = (_RUNS * _NOISE**2 + squares) / (_RUNS + freedom)
    quantile = _T95[min(freedom, len(_T95) - 1)]
    first = min(means, key=means.__getitem__)
    to_beat = means[first] - math.log1p(tolerance)

    doubtful = {first}
    for config, mean in means.items():
        error = math.sqrt(variance * (1 / counts[config] + 1 / counts[first]))
        if mean - quantile * error < to_beat:
            doubtful.add(config)

    if len(doubtful) < 2:
        return []
    return [finalist for finalist in called if finalist.config in doubtful]
