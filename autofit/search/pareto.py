"""The Pareto front of memory and throughput in each tier, and what every knob does to the best
config.

Measured configs count as measured. Others count by the surrogate's posterior, and are marked as
predicted; only where the space was predicted, so no figure rests on additive effects alone.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import (
    Alternative,
    OtherBudget,
    Point,
    fastest_within,
    frontier,
    thinned,
)
from autofit.core.result import TIERS, of_tier, tier, tiers_of
from autofit.core.workload import Workload
from autofit.search.beside_tensors import beside_tensors
from autofit.search.encoding import Configs, Encoding
from autofit.search.group import Group
from autofit.search.linear_model import Array
from autofit.search.predictions import Predictions, figures, is_known
from autofit.search.pruning import ACCUMULATION, ruled_out
from autofit.search.ranking import Measurements
from autofit.search.surrogate import Surrogate

_DERIVED = 5  # a single change may alter up to so many knobs: the others are derived from it
_MOST_PREDICTED = 3000  # configs of each tier, the nearest to its predicted front


@dataclass(frozen=True)
class Evidence:
    """What a search measured and predicted.

    Attributes:
        best: None where nothing fits.
        measurements: in their order, the verified ones last.
        failed: configs that fitted at first and did not when verified.
        surrogate: without it nothing is said of what was not measured.
        predictions: likewise.
    """

    best: Measurement | None
    measurements: Measurements
    failed: Configs
    surrogate: Surrogate | None
    predictions: Predictions | None
    budget: Budget
    hardware: Hardware
    workload: Workload

    @cached_property
    def levelled(self) -> list[Measurement]:
        """All measurements, the explored ones scaled by the best's speed when verified against when
        explored: the machine may have become faster or slower in between."""
        best = self.best
        if best is None:
            return list(self.measurements)

        same = (seen for seen in self.measurements if seen.config == best.config)
        explored = next(same, best)
        level = best.throughput / explored.throughput if explored.throughput else 1.0
        levelled = []
        for measurement in self.measurements:
            if measurement.fits and not measurement.verified:
                measurement = measurement.faster(level)
            levelled.append(measurement)

        return levelled

    @cached_property
    def latest(self) -> dict[Config, Measurement]:
        """By config its last measurement, without configs that failed when verified."""
        return {seen.config: seen for seen in self.levelled if seen.config not in self.failed}

    @property
    def usable_bytes(self) -> int:
        """What a config may take of the device, the context included."""
        return self.budget.cap_bytes(self.hardware.device)


@dataclass(frozen=True)
class ParetoReport:
    """What there is beside the best config.

    Attributes:
        frontier: the front of each tier.
        alternatives: single changes of the best config, knob by knob.
        other_budgets: those worth a mention.
    """

    frontier: dict[str, tuple[Point, ...]]
    alternatives: tuple[Alternative, ...] = ()
    other_budgets: tuple[OtherBudget, ...] = ()


def pareto_report(
    evidence: Evidence,
    *,
    others: Sequence[OtherBudget] = (),
    tolerance: float = 0.0,
) -> ParetoReport:
    """The alternatives to the best config.

    Fronts are thinned, but keep what this budget and the others would run.

    Args:
        others: budgets to compare with. One is worth a mention where it is that of a card, or would
            run something else: with a small model most sizes run the same.
        tolerance: as of `frontier`.
    """
    changes = _single_changes(evidence) if evidence.best else {}
    leaders = []
    if evidence.predictions:
        leaders = leading(evidence.predictions, _MOST_PREDICTED)

    predicted = predicted_points(dict.fromkeys((*leaders, *changes)), evidence)

    points = []
    for measurement in evidence.latest.values():
        peak = measurement.peak_bytes
        if measurement.fits and measurement.throughput and peak:
            point = Point(
                measurement.config,
                peak.held_bytes,
                measurement.throughput,
                measurement.tokens_per_second,
                measured=True,
            )
            points.append(point)

    points.extend(predicted.values())

    fronts = {}
    for name in tiers_of(points):
        fronts[name] = frontier(of_tier(name, points), tolerance=tolerance)

    def answers(budget: Budget) -> list[Point | None]:
        """What would run within a budget, one of each tier."""
        limit = budget.cap_bytes(evidence.hardware.device)
        return [fastest_within(front, limit) for front in fronts.values()]

    own = answers(evidence.budget)
    answered = set(own)
    mentioned = []
    for other in others:
        budget = dataclasses.replace(evidence.budget, device_bytes=other.device_bytes)
        theirs = answers(budget)
        answered.update(theirs)
        if other.card or theirs != own:
            mentioned.append(other)

    keep = list(filter(None, answered))
    return ParetoReport(
        {name: thinned(front, keep) for name, front in fronts.items()},
        _alternatives(changes, predicted, evidence),
        tuple(mentioned),
    )


def _single_changes(evidence: Evidence) -> dict[Config, str]:
    """The configs, measured or only predicted, that differ from the best in one knob, and that
    knob."""
    assert evidence.best, "there is something to change"
    best = evidence.best.config
    near = []
    if evidence.predictions:
        # Up to 300,000, all with their knobs in one order; the few near ones are compared knob by
        # knob.
        of_best = tuple(best.values())
        for config in evidence.predictions.nbytes:
            differing = sum(map(operator.ne, of_best, config.values()))
            if differing <= _DERIVED:
                near.append(config)

    changes = {}
    for config in (*evidence.latest, *near):
        changed = []
        for knob, values in best.differences(config).items():
            if knob != ACCUMULATION and None not in values:  # neither derived nor without meaning
                changed.append(knob)
        if len(changed) == 1:
            changes[config] = changed[0]

    return changes


def _alternatives(
    changes: dict[Config, str], predicted: dict[Config, Point], evidence: Evidence
) -> tuple[Alternative, ...]:
    """One for each value of each knob.

    Knobs come in the order of a config, values of one with the fastest first.
    """
    found = []
    for config, knob in changes.items():
        alternative = _alternative(config, knob, predicted, evidence)
        if alternative:
            found.append(alternative)

    found.sort(key=lambda one: (not one.fits, -(one.samples_per_second or 0.0), not one.measured))
    found.sort(key=lambda one: list(one.config).index(one.knob))
    by_value: dict[tuple[str, object], Alternative] = {}
    for alternative in found:  # some also differ in a knob that means something beside it only
        by_value.setdefault((alternative.knob, alternative.value), alternative)

    return tuple(by_value.values())


def _alternative(
    config: Config,
    knob: str,
    predicted: dict[Config, Point],
    evidence: Evidence,
) -> Alternative | None:
    """A single change with its figures; None where nothing is known of it."""
    source: Measurement | Point | None = evidence.latest.get(config) or predicted.get(config)
    size: int | None = None
    if isinstance(source, Measurement):
        outcome = source.outcome
        size = source.peak_bytes.held_bytes if source.peak_bytes else None
        if not source.fits and (size or 0) <= evidence.usable_bytes:
            size = None  # a run that ended early has not reached its peak
    elif source:
        size = source.peak_bytes
        fits = size <= evidence.usable_bytes
        outcome = Outcome.FITS if fits else Outcome.OUT_OF_MEMORY
    else:
        return None

    return Alternative(
        knob,
        config,
        outcome,
        size,
        source.samples_per_second,
        source.tokens_per_second,
        measured=isinstance(source, Measurement),
    )


def leading(predictions: Predictions, most: int) -> list[Config]:
    """The configs predicted to be nearest to the front of their tier, at most `most` of each."""
    configs = list(predictions.nbytes)
    nbytes = np.array(list(predictions.nbytes.values()), dtype=float)
    seconds = figures(predictions.seconds, configs)
    known = is_known(nbytes) & is_known(seconds)
    tiers = np.array([TIERS.index(tier(config)) for config in configs])

    found: list[Config] = []
    for number, _ in enumerate(TIERS):
        # By rising size: how many times slower each is than the fastest that is no larger.
        indices = np.flatnonzero(known & (tiers == number))
        by_size = np.lexsort((seconds[indices], nbytes[indices]))
        indices = indices[by_size]

        behind = seconds[indices] / np.minimum.accumulate(seconds[indices])
        nearest = np.argsort(behind, kind="stable")[:most]
        found.extend(map(configs.__getitem__, indices[nearest].tolist()))

    return found


def predicted_points(configs: Iterable[Config], evidence: Evidence) -> dict[Config, Point]:
    """Memory and speed expected of configs.

    Only of those that are predicted, likely work, and were not measured whole.
    """
    surrogate = evidence.surrogate
    unmeasured = [config for config in configs if _is_open(config, evidence)]
    if surrogate is None or not unmeasured:
        return {}

    measurements = evidence.levelled
    group = surrogate.group(unmeasured)
    sizes = _predicted_bytes(surrogate, group, evidence)
    speeds = np.exp(surrogate.speeds(measurements, group).mean)
    best = evidence.best
    if best is not None and best.step_seconds is not None:
        # As fast relative to the best as expected.
        of_best = surrogate.group([best.config])
        (expected,) = np.exp(surrogate.speeds(measurements, of_best).mean)
        speeds = speeds * float(1 / best.step_seconds.median / expected)

    works = surrogate.works(measurements, group)

    workload = evidence.workload
    length = workload.sequence_length if workload.unit == "tokens" else None
    points = {}
    for index, config in enumerate(unmeasured):
        if works[index] > 0.5:
            rate = float(speeds[index]) * workload.effective_batch_size
            tokens = rate * length if length else None
            points[config] = Point(
                config,
                int(sizes[index]),
                rate,
                tokens,
                measured=False,
            )

    return points


def _is_open(config: Config, evidence: Evidence) -> bool:
    """Whether a config is predicted, and its measurements leave its memory and speed open."""
    if evidence.predictions is None or config in evidence.failed:
        return False

    measured = evidence.latest.get(config)
    if measured and measured.outcome is not Outcome.OUT_OF_MEMORY:
        return False

    nbytes = evidence.predictions.nbytes.get(config, math.nan)
    seconds = evidence.predictions.seconds.get(config, math.nan)
    return 0 < nbytes < math.inf and 0 < seconds < math.inf


def _predicted_bytes(
    surrogate: Surrogate,
    group: Group,
    evidence: Evidence,
) -> Array:
    """The bytes of configs, as the budget counts them.

    They are more than there is where an out-of-memory proves that.
    """
    latest = evidence.latest.values()
    nbytes = np.exp(surrogate.memory.sizes(evidence.levelled, group).means)
    if evidence.hardware.device != "cpu":
        nbytes = beside_tensors(latest, evidence.hardware.context_bytes).held(nbytes)

    failed = [seen for seen in latest if seen.outcome is Outcome.OUT_OF_MEMORY]
    encoding = Encoding(group.configs if failed else ())
    for measurement in failed:
        least = evidence.usable_bytes + 1
        if measurement.peak_bytes:
            least = max(least, measurement.peak_bytes.held_bytes)
        as_much = ruled_out(measurement.config, encoding, surrogate.memory_order)
        nbytes[as_much] = np.maximum(nbytes[as_much], least)

    return nbytes
