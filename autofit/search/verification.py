"""Verification: the finalists of a search are measured again, longer and in turn, before anyone sees them.

Short measurements that are too good by chance rank first. So finalists are chosen by the posterior given all
measurements, not by each one's own; the winner is chosen by the verified measurements alone.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autofit.core.config import Config
from autofit.core.measurement import Measurement, StepSeconds
from autofit.core.result import tier
from autofit.search.ranking import Ranking

ROUNDS = 2  # of the recommended one and its rivals, A, B, A, B: a disturbance of the machine affects all
MOST_ROUNDS = 3  # while the leader is in doubt; on the recorded tables that halved what two rounds missed
_NOISE, _RUNS = 0.018, 3  # expected of one run, in logarithms, and how many degrees of freedom that counts for
FIELD, MOST = 3, 5  # finalists measured in turn, and in all
# A config expected to be slower than the first by more than the tolerance and this is no finalist. On recorded tables
# (benchmarks.replay) fields of 3, 4 and 6 that were 8 % wide found the same, and one of 2 missed a little.
_DOUBT = 0.05
# By so much a machine may have slowed down since it explored. On recorded tables, with finals 10 % slower, to call up
# whatever was faster when explored took a sixth more finals, and changed no answer.
_SLOWER = 0.15
_ELSEWHERE = 0.1  # also this where exploring had fewer cores: an assumption, since the order may differ there
# One-sided 95 % quantiles of Student's t by degrees of freedom, from 3.
_T95 = (2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)

Rounds = dict[Config, list[Measurement]]  # the measurements of each finalist
Measure = Callable[[Measurement], Measurement | None]


class _NoTimeError(Exception):
    """There is no time for more."""


@dataclass(frozen=True)
class Verification:
    """The explored measurements, the verified ones, and the configs that failed verification."""

    explored: tuple[Measurement, ...]
    verified: tuple[Measurement, ...] = ()
    failed: tuple[Config, ...] = ()
    interrupted: bool = False
    out_of_time: bool = False

    def candidates(self) -> tuple[Measurement, ...]:
        """The measurements to choose the best from: the verified; the explored if an interrupt, or the time, left no
        others."""
        if self.verified or not (self.interrupted or self.out_of_time):
            return self.verified
        return tuple(each for each in self.explored if each.config not in self.failed)

    def latest(self) -> tuple[Measurement, ...]:
        """Of every config that fits, its latest measurement."""
        by_config = {each.config: each for each in (*self.explored, *self.verified) if each.fits}
        return tuple(each for config, each in by_config.items() if config not in self.failed)


def verify(
    explored: Sequence[Measurement],
    posterior: Sequence[Measurement],
    measure: Measure,
    ranking: Ranking,
    *,
    seconds_left: Callable[[], float] = lambda: math.inf,
    elsewhere: bool = False,
    before: Sequence[Measurement] = (),
    finished: bool = False,
) -> Verification:
    """Measure the possible winners again: at least the best and the runner-up, and the next one for each that fails or
    turns out much slower than a config that was only explored. Once something is verified, nothing is measured that is
    expected to take longer than there is time.

    Args:
        posterior: one measurement of every config that fits, at its expected speed.
        measure: measures a finalist, longer and in a fresh process; None where the time was up first.
        ranking: which of them to recommend.
        seconds_left: until the end of the time for all of this.
        elsewhere: whether `measure` has more cores than exploring probes: more configs may win there, and explored
            measurements cannot be compared with verified ones, so one of each tier is verified.
        before: what `measure` gave in a process that was killed, in order: none of it is measured again.
        finished: whether that process came to the end of this, so that nothing more is measured.
    """
    waiting = ranking.finalists(posterior)
    verified: list[Measurement] = []
    failed: list[Config] = []
    rounds: Rounds = {}
    took: list[float] = []  # seconds of each
    read_back = _ReadBack(before)

    def measure_in_time(finalist: Measurement) -> Measurement:
        seen = read_back.next_of(finalist)
        if seen is None:
            has_answer = bool(verified or passed(rounds, 1))
            if finished or (has_answer and seconds_left() < max(took)):
                raise _NoTimeError
            seen = measure(finalist)
            if seen is None:
                raise _NoTimeError
        took.append(seen.seconds)
        return seen

    try:
        while called := _called(waiting, verified, ranking, elsewhere=elsewhere):
            waiting = [each for each in waiting if each not in called]
            rounds = {finalist.config: [] for finalist in called}
            _in_turn(called[:2], measure_in_time, rounds)
            if len(called) > 2:  # the answer is verified before all of the field is measured
                _in_turn(_best_once_more(called[:2], rounds, ranking), measure_in_time, rounds)
                _in_turn(called[2:], measure_in_time, rounds)
            while again := _again(called, rounds, ranking):
                _in_turn(again, measure_in_time, rounds)
            verified += passed(rounds, 1)
            failed += _failed(rounds)
    except _NoTimeError:
        verified += passed(rounds, 1)
        failed += _failed(rounds)
        return Verification(tuple(explored), tuple(verified), tuple(failed), out_of_time=True)
    except KeyboardInterrupt:
        return Verification(tuple(explored), (*verified, *passed(rounds)), tuple(failed), interrupted=True)
    return Verification(tuple(explored), tuple(verified), tuple(failed))


def confirm(
    explored: Sequence[Measurement],
    posterior: Sequence[Measurement],
    measure: Measure,
    ranking: Ranking,
    *,
    before: Sequence[Measurement] = (),
) -> Verification:
    """Measure the one to recommend once more, or the next one for each that fails; arguments as of `verify`."""
    failed: list[Config] = []
    read_back = _ReadBack(before)
    try:
        for finalist in ranking.finalists(posterior)[:MOST]:
            seen = read_back.next_of(finalist) or measure(finalist)
            if seen is None:
                return Verification(tuple(explored), (), tuple(failed), out_of_time=True)
            if seen.fits:
                return Verification(tuple(explored), (joined([seen]),), tuple(failed))
            failed.append(finalist.config)
    except KeyboardInterrupt:
        return Verification(tuple(explored), (), tuple(failed), interrupted=True)
    return Verification(tuple(explored), (), tuple(failed))


class _ReadBack:
    """Measurements that were made before, each of which is given once."""

    def __init__(self, before: Sequence[Measurement]) -> None:
        self._left: Rounds = {}
        for each in before:
            self._left.setdefault(each.config, []).append(each)

    def next_of(self, finalist: Measurement) -> Measurement | None:
        left = self._left.get(finalist.config)
        return left.pop(0) if left else None


def passed(rounds: Rounds, enough: int = ROUNDS) -> list[Measurement]:
    """One measurement of each finalist that fitted in all of its rounds, if those are enough."""
    return [joined(of_one) for of_one in rounds.values() if len(of_one) >= enough and of_one[-1].fits]


def _failed(rounds: Rounds) -> list[Config]:
    return [config for config, of_one in rounds.items() if of_one and not of_one[-1].fits]


def joined(rounds: Sequence[Measurement]) -> Measurement:
    """One verified measurement of several rounds: the mean of their medians, the widest interval, the highest peak."""
    last = rounds[-1]
    times = [each.step_seconds for each in rounds if each.step_seconds]
    median = sum(each.median for each in times) / len(times)
    peaks = [each.peak_bytes for each in rounds if each.peak_bytes]
    return dataclasses.replace(
        last.taking(median),
        step_seconds=StepSeconds(median, min(each.low for each in times), max(each.high for each in times)),
        peak_bytes=max(peaks, key=lambda peak: peak.reserved or peak.allocated),
        seconds=sum(each.seconds for each in rounds),
        steps=sum(each.steps for each in rounds),
        verified=True,
    )


def _called(
    waiting: Sequence[Measurement], verified: Sequence[Measurement], ranking: Ranking, *, elsewhere: bool
) -> list[Measurement]:
    """The next to measure: the first field, a missing runner-up, or a config expected to beat all verified ones.
    Elsewhere no config is expected to; there it is the best of a tier that has none verified."""
    if not verified:
        if elsewhere:
            return _field(waiting, ranking, _DOUBT + _ELSEWHERE, MOST)
        return _field(waiting, ranking, _DOUBT, FIELD)
    if len(verified) < 2:
        return list(waiting[:1])
    if elsewhere:
        done = {tier(each.config) for each in verified}
        return [each for each in waiting if tier(each.config) not in done][:1]
    if len(verified) >= MOST:
        return []
    to_beat = max(map(ranking.value, verified)) * (1 + ranking.tolerance + _SLOWER)
    better = [each for each in waiting if ranking.value(each) > to_beat]
    return better[:1]


def _field(waiting: Sequence[Measurement], ranking: Ranking, doubt: float, most: int) -> list[Measurement]:
    """The first two, and others that are within the tolerance and the doubt of the best."""
    enough = max(map(ranking.value, waiting), default=0.0) * (1 - ranking.tolerance - doubt)
    close = [each for each in waiting[2:] if ranking.value(each) >= enough]
    return [*waiting[:2], *close][:most]


def _in_turn(called: Sequence[Measurement], measure: Callable[[Measurement], Measurement], rounds: Rounds) -> None:
    """Measure each once more, never alive together; one that fails is not tried again."""
    for finalist in called:
        of_one = rounds[finalist.config]
        if not of_one or of_one[-1].fits:
            of_one.append(measure(finalist))


def _again(called: Sequence[Measurement], rounds: Rounds, ranking: Ranking) -> list[Measurement]:
    """Next to measure again: leading candidates with the fewest rounds, else the recommended one until ROUNDS."""
    doubtful = _in_doubt(called, rounds, ranking.tolerance)
    fewest = min((len(rounds[each.config]) for each in doubtful), default=MOST_ROUNDS)
    if fewest < MOST_ROUNDS:
        return [each for each in doubtful if len(rounds[each.config]) == fewest]
    return _best_once_more(called, rounds, ranking)


def _best_once_more(called: Sequence[Measurement], rounds: Rounds, ranking: Ranking) -> list[Measurement]:
    """The one to recommend, unless it had enough rounds."""
    those = {each.config: rounds[each.config] for each in called if rounds[each.config]}
    best = ranking.recommend(passed(those, 1))
    return [best] if best and len(rounds[best.config]) < ROUNDS else []


def _in_doubt(called: Sequence[Measurement], rounds: Rounds, tolerance: float) -> list[Measurement]:
    """The leader and those that may, at 95 %, be faster than it by more than the tolerance; empty without the latter.
    By Student's t with the variance pooled over all rounds and what is expected of it, in logarithms: a machine's noise
    is a share of the time."""
    times = {
        config: [math.log(each.step_seconds.median) for each in of_one if each.step_seconds]
        for config, of_one in rounds.items()
        if of_one[-1].fits
    }
    if len(times) < 2:
        return []
    freedom = sum(len(of_one) - 1 for of_one in times.values())
    squares = sum(statistics.pvariance(of_one) * len(of_one) for of_one in times.values())
    variance = (_RUNS * _NOISE**2 + squares) / (_RUNS + freedom)
    quantile = _T95[min(freedom, len(_T95) - 1)]
    means = {config: statistics.fmean(of_one) for config, of_one in times.items()}
    first = min(means, key=means.__getitem__)

    def least(config: Config) -> float:
        error = math.sqrt(variance * (1 / len(times[config]) + 1 / len(times[first])))
        return means[config] - quantile * error

    doubtful = [each for each in means if least(each) < means[first] - math.log1p(tolerance)]
    rivals = {first, *doubtful} if set(doubtful) - {first} else set()
    return [each for each in called if each.config in rivals]
