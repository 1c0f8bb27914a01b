"""The Pareto front of memory and throughput in each tier, and what every knob does to the best config.

Measured configs count as measured. Others count by the surrogate's posterior, and are marked as predicted; only where
the space was predicted, so no figure rests on additive effects alone.
"""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Alternative, OtherBudget, Point, fastest_within, frontier, thinned
from autofit.core.result import TIERS, tier, tiers_of
from autofit.core.workload import Workload
from autofit.search.beside_tensors import beside_tensors
from autofit.search.encoding import Encoding
from autofit.search.linear_model import Array
from autofit.search.predictions import Predictions
from autofit.search.pruning import ACCUMULATION, ruled_out
from autofit.search.surrogate import Surrogate

_DERIVED = 5  # a single change may alter up to so many knobs: the others are derived from it
_MOST_PREDICTED = 3000  # configs of each tier, the nearest to its predicted front


@dataclass(frozen=True)
class Evidence:
    """What a search measured and predicted."""

    best: Measurement | None  # None where nothing fits
    measurements: Sequence[Measurement]  # in their order, the verified ones last
    failed: Sequence[Config]  # those that fitted at first and did not when verified
    surrogate: Surrogate | None
    predictions: Predictions | None
    budget: Budget
    hardware: Hardware
    workload: Workload

    @cached_property
    def levelled(self) -> list[Measurement]:
        """All measurements, the explored ones scaled by the best's speed when verified against when explored: the
        machine may have become faster or slower in between."""
        best = self.best
        explored = next((each for each in self.measurements if best and each.config == best.config), best)
        level = best.throughput / explored.throughput if best and explored and explored.throughput else 1.0
        return [each if each.verified or not each.fits else each.faster(level) for each in self.measurements]

    @cached_property
    def latest(self) -> dict[Config, Measurement]:
        """By config its last measurement, without configs that failed when verified."""
        return {each.config: each for each in self.levelled if each.config not in self.failed}

    @property
    def usable_bytes(self) -> int:
        """What a config may take of the device, the context included."""
        return self.budget.cap_bytes(self.hardware.device)


@dataclass(frozen=True)
class Outlook:
    """The front of each tier, the single changes of the best config knob by knob, and other budgets worth a mention."""

    frontier: dict[str, tuple[Point, ...]]
    alternatives: tuple[Alternative, ...] = ()
    other_budgets: tuple[OtherBudget, ...] = ()


def outlook(evidence: Evidence, *, others: Sequence[OtherBudget] = (), tolerance: float = 0.0) -> Outlook:
    """The alternatives to the best config. Fronts are thinned, but keep what this budget and the others would run.
    Another budget is worth a mention where it is that of a card, or would run something else: with a small model most
    sizes run the same."""
    knobs = _single_changes(evidence.best.config, evidence) if evidence.best else {}
    asked = dict.fromkeys((*(leading(evidence.predictions, _MOST_PREDICTED) if evidence.predictions else ()), *knobs))
    predicted = predicted_points(asked, evidence)
    measured = [
        Point(each.config, each.peak_bytes.held_bytes, each.throughput, each.tokens_per_second, measured=True)
        for each in evidence.latest.values()
        if each.fits and each.throughput and each.peak_bytes
    ]
    points = [*measured, *predicted.values()]
    budgets = (dataclasses.replace(evidence.budget, device_bytes=each.device_bytes) for each in others)
    limits = [each.cap_bytes(evidence.hardware.device) for each in (evidence.budget, *budgets)]
    fronts = {
        name: frontier([each for each in points if tier(each.config) == name], tolerance=tolerance)
        for name in tiers_of(points)
    }
    own, *by_budget = ([fastest_within(front, limit) for front in fronts.values()] for limit in limits)
    answers = [point for each in (own, *by_budget) for point in each if point]
    return Outlook(
        {name: thinned(front, [each for each in answers if each in front]) for name, front in fronts.items()},
        _alternatives(knobs, predicted, evidence),
        tuple(other for other, each in zip(others, by_budget, strict=True) if other.card or each != own),
    )


def _single_changes(best: Config, evidence: Evidence) -> dict[Config, str]:
    """The configs, measured or only predicted, that differ from the best in one knob, and that knob."""
    values = tuple(best.values())
    every = evidence.predictions.nbytes if evidence.predictions else {}
    # Up to 300,000, all with their knobs in one order; the few near ones are compared knob by knob.
    near = (config for config in every if sum(map(operator.ne, values, config.values())) <= _DERIVED)
    return {config: knob for config in (*evidence.latest, *near) if (knob := _only_change(best, config))}


def _only_change(best: Config, config: Config) -> str | None:
    """The only knob that differs, ignoring derived and null knobs."""
    pairs = ((knob, value, config.get(knob)) for knob, value in best.items() if knob != ACCUMULATION)
    changed = [knob for knob, one, two in pairs if one != two and one is not None and two is not None]
    return changed[0] if len(changed) == 1 else None


def _alternatives(
    knobs: dict[Config, str], predicted: dict[Config, Point], evidence: Evidence
) -> tuple[Alternative, ...]:
    """One for each value of each knob, knobs in the order of a config and of each the fastest first."""
    found = []
    for config, knob in knobs.items():
        source = evidence.latest.get(config) or predicted.get(config)
        if isinstance(source, Measurement):
            size, outcome = source.peak_bytes.held_bytes if source.peak_bytes else None, source.outcome
            if not source.fits and (size or 0) <= evidence.usable_bytes:
                size = None  # a run that ended early has not reached its peak
        elif source:
            size = source.peak_bytes
            outcome = Outcome.FITS if size <= evidence.usable_bytes else Outcome.OUT_OF_MEMORY
        else:
            continue
        speeds = source.samples_per_second, source.tokens_per_second
        found.append(Alternative(knob, config, outcome, size, *speeds, measured=isinstance(source, Measurement)))
    found.sort(key=lambda each: (not each.fits, -(each.samples_per_second or 0.0), not each.measured))
    found.sort(key=lambda each: list(each.config).index(each.knob))
    by_value: dict[tuple[str, object], Alternative] = {}
    for each in found:  # some also differ in a knob that has a meaning only beside the new value
        by_value.setdefault((each.knob, each.value), each)
    return tuple(by_value.values())


def leading(predictions: Predictions, most: int) -> list[Config]:
    """The configs predicted to be the nearest to the front of their tier, at most `most` of each."""
    configs = list(predictions.nbytes)
    nbytes = np.fromiter(predictions.nbytes.values(), dtype=float, count=len(configs))
    seconds = np.array([predictions.seconds.get(config, np.nan) for config in configs], dtype=float)
    known = np.isfinite(nbytes) & np.isfinite(seconds) & (nbytes > 0) & (seconds > 0)
    tiers = np.array([TIERS.index(tier(config)) for config in configs])
    found: list[Config] = []
    for number in range(len(TIERS)):
        indices = np.flatnonzero(known & (tiers == number))
        indices = indices[np.lexsort((seconds[indices], nbytes[indices]))]
        behind = seconds[indices] / np.minimum.accumulate(seconds[indices])
        found += [configs[index] for index in indices[np.argsort(behind, kind="stable")[:most]].tolist()]
    return found


def predicted_points(configs: Iterable[Config], evidence: Evidence) -> dict[Config, Point]:
    """Memory and speed expected of those configs that are predicted, likely work, and were not measured whole."""
    surrogate, measurements, workload = evidence.surrogate, evidence.levelled, evidence.workload
    asked = [config for config in configs if _is_open(config, evidence)]
    if surrogate is None or not asked:
        return {}
    group = surrogate.group(asked)
    nbytes = _held_bytes(np.exp(surrogate.memory(measurements, group).means), evidence)
    missed = [each for each in evidence.latest.values() if each.outcome is Outcome.OUT_OF_MEMORY]
    encoding = Encoding(asked if missed else ())
    for each in missed:  # it needs more than there is, and so does what needs as much
        least = max(each.peak_bytes.held_bytes if each.peak_bytes else 0, evidence.usable_bytes + 1)
        as_much = ruled_out(each.config, encoding, surrogate.memory_order)
        nbytes[as_much] = np.maximum(nbytes[as_much], least)
    speeds = np.exp(surrogate.speeds(measurements, group).posterior.mean)
    best = evidence.best
    if best is not None and best.step_seconds is not None:  # as fast relative to the best as expected
        (expected,) = np.exp(surrogate.speeds(measurements, surrogate.group([best.config])).posterior.mean)
        speeds = speeds * float(1 / best.step_seconds.median / expected)
    works = surrogate.works(measurements, group) > 0.5
    length = workload.sequence_length if workload.unit == "tokens" else None
    points = {}
    for config, size, speed, work in zip(asked, nbytes.tolist(), speeds.tolist(), works.tolist(), strict=True):
        if work:
            rate = speed * workload.effective_batch_size
            points[config] = Point(config, int(size), rate, rate * length if length else None, measured=False)
    return points


def _is_open(config: Config, evidence: Evidence) -> bool:
    """Whether a config is predicted, and its measurements leave its memory and speed open."""
    measured, predictions = evidence.latest.get(config), evidence.predictions
    if config in evidence.failed or (measured and measured.outcome is not Outcome.OUT_OF_MEMORY):
        return False
    figures = [each.get(config, np.nan) for each in (predictions.nbytes, predictions.seconds)] if predictions else [0.0]
    return all(np.isfinite(each) and each > 0 for each in figures)


def _held_bytes(allocated: Array, evidence: Evidence) -> Array:
    """As the budget counts them."""
    if evidence.hardware.device == "cpu":
        return allocated
    return beside_tensors(evidence.latest.values(), evidence.hardware.context_bytes).held(allocated)
