"""What is believed of configs that a search never measured, as points of memory and throughput: predictions, corrected
by what the measurements showed them to be off by. Only where the space was predicted; nothing is made up of effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Point
from autofit.core.result import TIERS, tier
from autofit.core.workload import Workload
from autofit.search.encoding import Columns
from autofit.search.linear_model import Array
from autofit.search.predictions import Predictions
from autofit.search.pruning import ruled_out
from autofit.search.surrogate import Surrogate

_LIKELY_TO_WORK = 0.5


@dataclass(frozen=True)
class Evidence:
    """All that a search saw, and what it was about.

    best: None where nothing fits. measurements: in their order, the verified ones last. failed: configs that fitted at
    first and did not when verified. surrogate, expected: None where nothing is predicted.
    """

    best: Measurement | None
    measurements: Sequence[Measurement]
    failed: Sequence[Config]
    surrogate: Surrogate | None
    expected: Predictions | None
    budget: Budget
    hardware: Hardware
    workload: Workload

    @cached_property
    def levelled(self) -> list[Measurement]:
        """All measurements, the explored ones at the level of the verified: the machine may have become faster or
        slower in between, by as much as the best did."""
        best = self.best
        explored = next((each for each in self.measurements if best and each.config == best.config), best)
        level = best.throughput / explored.throughput if best and explored and explored.throughput else 1.0
        return [each if each.verified else _faster(each, level) for each in self.measurements]

    @cached_property
    def latest(self) -> dict[Config, Measurement]:
        """By config the last of them, but for those that failed when verified."""
        return {each.config: each for each in self.levelled if each.config not in self.failed}

    @property
    def usable_bytes(self) -> int:
        """What may be taken of the budget, the context included."""
        return self.budget.cap_bytes(self.hardware.device)


def _faster(measurement: Measurement, level: float) -> Measurement:
    steps = measurement.step_seconds
    return measurement.taking(steps.median / level) if measurement.fits and steps else measurement


def leading(expected: Predictions, most: int) -> list[Config]:
    """Of each tier at most so many, those first that are predicted to be the nearest to its frontier."""
    configs = list(expected.nbytes)
    nbytes = np.fromiter(expected.nbytes.values(), dtype=float, count=len(configs))
    seconds = np.array([expected.seconds.get(config, np.nan) for config in configs], dtype=float)
    known = np.isfinite(nbytes) & np.isfinite(seconds) & (nbytes > 0) & (seconds > 0)
    tiers = np.array([TIERS.index(tier(config)) for config in configs])
    found: list[Config] = []
    for number in range(len(TIERS)):
        places = np.flatnonzero(known & (tiers == number))
        places = places[np.lexsort((seconds[places], nbytes[places]))]
        behind = seconds[places] / np.minimum.accumulate(seconds[places])
        found += [configs[place] for place in places[np.argsort(behind, kind="stable")[:most]].tolist()]
    return found


def believed(configs: Iterable[Config], evidence: Evidence) -> dict[Config, Point]:
    """What configs are believed to take and to reach: those that are predicted, were not measured or lacked nothing but
    memory, and probably work."""
    surrogate, known = evidence.surrogate, evidence.levelled
    asked = [config for config in configs if _can_be_told(config, evidence)]
    if surrogate is None or not asked:
        return {}
    group = surrogate.group(asked)
    nbytes = _peaks(np.exp(surrogate.memory(known, group)[0]), evidence)
    _raise_what_cannot_fit(nbytes, asked, evidence)
    steps = np.exp(surrogate.speeds(known, group).expected.mean) * _level(evidence)
    works = surrogate.works(known, group) > _LIKELY_TO_WORK
    rows = zip(asked, nbytes.tolist(), steps.tolist(), works.tolist(), strict=True)
    return {config: _point(config, size, rate, evidence.workload) for config, size, rate, work in rows if work}


def _level(evidence: Evidence) -> float:
    """By how much the best was measured to be faster than is believed of it: all else is told relative to the best."""
    best = evidence.best
    if best is None or best.step_seconds is None or evidence.surrogate is None:
        return 1.0
    group = evidence.surrogate.group([best.config])
    (steps,) = np.exp(evidence.surrogate.speeds(evidence.levelled, group).expected.mean)
    return float(1 / best.step_seconds.median / steps)


def _can_be_told(config: Config, evidence: Evidence) -> bool:
    measured = evidence.latest.get(config)
    if config in evidence.failed or (measured and measured.outcome is not Outcome.OUT_OF_MEMORY):
        return False
    expected = evidence.expected
    if expected is None:
        return False
    figures = expected.nbytes.get(config, np.nan), expected.seconds.get(config, np.nan)
    return all(np.isfinite(each) and each > 0 for each in figures)


def _peaks(allocated: Array, evidence: Evidence) -> Array:
    """As they are held against the budget: on a GPU what the allocator takes for the tensors, and the context."""
    if evidence.hardware.device == "cpu":
        return allocated
    peaks = [each.peak_bytes for each in evidence.latest.values() if each.fits and each.peak_bytes]
    shares = [peak.reserved / peak.allocated for peak in peaks if peak.reserved and peak.allocated]
    contexts = [peak.device - peak.reserved for peak in peaks if peak.device and peak.reserved]
    context = float(np.median(contexts)) if contexts else evidence.hardware.context_bytes
    return allocated * (float(np.median(shares)) if shares else 1.0) + context


def _raise_what_cannot_fit(nbytes: Array, configs: Sequence[Config], evidence: Evidence) -> None:
    """What ran out of memory needs more than there is, and so does what must need as much."""
    assert evidence.surrogate, "without them there are no sizes to raise"
    missed = [each for each in evidence.latest.values() if each.outcome is Outcome.OUT_OF_MEMORY]
    columns = Columns(configs if missed else ())
    for each in missed:
        took = each.peak_bytes.held_bytes if each.peak_bytes else 0
        as_much = ruled_out(each.config, columns, evidence.surrogate.memory_order)
        nbytes[as_much] = np.maximum(nbytes[as_much], max(took, evidence.usable_bytes + 1))


def _point(config: Config, nbytes: float, steps_per_second: float, workload: Workload) -> Point:
    rate = steps_per_second * workload.effective_batch_size
    length = workload.sequence_length if workload.unit == "tokens" else None
    return Point(config, int(nbytes), rate, rate * length if length else None, measured=False)
