"""What lies around the answer of a search: the frontier of each tier, and what every knob does to the best config.

What was measured counts as it was measured; of the rest it is told what is believed of it, and marked so.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Alternative, OtherBudget, Point, fastest_within, frontier, thinned
from autofit.core.result import TIERS, tier
from autofit.search.foresight import Evidence, believed, leading
from autofit.search.pruning import ACCUMULATION

_FOLLOWING = 5  # knobs may differ in what is a single change: the others follow from it
_LOOKED_AT = 3000  # of each tier, the nearest to its predicted frontier


@dataclass(frozen=True)
class Outlook:
    """By tier its frontier; the single changes of the best config, knob by knob; the other budgets worth a word."""

    frontier: dict[str, tuple[Point, ...]]
    alternatives: tuple[Alternative, ...] = ()
    other_budgets: tuple[OtherBudget, ...] = ()


def outlook(evidence: Evidence, *, others: Sequence[OtherBudget] = (), tolerance: float = 0.0) -> Outlook:
    """What lies around the best config, if there is one.

    A frontier is thinned out, but what the budget and the others would run of it stays. Another budget is worth a word
    where it is that of a card, or would run something else: beside a small model most sizes run the same.
    """
    changed = _single_changes(evidence.best.config, evidence) if evidence.best else {}
    asked = dict.fromkeys((*(leading(evidence.expected, _LOOKED_AT) if evidence.expected else ()), *changed))
    predicted = believed(asked, evidence)
    points = [*_measured_points(evidence), *predicted.values()]
    budgets = (dataclasses.replace(evidence.budget, device_bytes=each.device_bytes) for each in others)
    limits = [each.cap_bytes(evidence.hardware.device) for each in (evidence.budget, *budgets)]
    wholes = {
        name: frontier([each for each in points if tier(each.config) == name], tolerance=tolerance) for name in TIERS
    }
    here, *there = ([fastest_within(whole, limit) for whole in wholes.values()] for limit in limits)
    answers = [point for each in (here, *there) for point in each if point]
    return Outlook(
        {name: thinned(whole, [each for each in answers if each in whole]) for name, whole in wholes.items()},
        _alternatives(changed, predicted, evidence),
        tuple(other for other, each in zip(others, there, strict=True) if other.card or each != here),
    )


def _measured_points(evidence: Evidence) -> list[Point]:
    return [
        Point(each.config, each.peak_bytes.held_bytes, each.throughput, each.tokens_per_second, measured=True)
        for each in evidence.latest.values()
        if each.fits and each.throughput and each.peak_bytes
    ]


def _single_changes(best: Config, evidence: Evidence) -> dict[Config, str]:
    """The configs, measured or only predicted, that differ from the best in one knob; and which."""
    values = tuple(best.values())
    every = evidence.expected.nbytes if evidence.expected else {}
    # There may be 232,224, all with their knobs in one order; few come near, and those are looked at closely.
    near = (config for config in every if sum(map(operator.ne, values, config.values())) <= _FOLLOWING)
    return {config: knob for config in (*evidence.latest, *near) if (knob := _only_change(best, config))}


def _only_change(best: Config, config: Config) -> str | None:
    """The one knob that differs; what follows from others, and what has no meaning beside them, does not count."""
    changed = None
    for knob, value in best.items():
        other = config.get(knob)
        if value != other and knob != ACCUMULATION and value is not None and other is not None:
            if changed is not None:
                return None
            changed = knob
    return changed


def _alternatives(
    changed: dict[Config, str], predicted: dict[Config, Point], evidence: Evidence
) -> tuple[Alternative, ...]:
    """One for each value of each knob, knobs in the order of a config and of each the fastest first."""
    measured = evidence.latest
    found = [
        *(_as_measured(knob, measured[config], evidence) for config, knob in changed.items() if config in measured),
        *(
            _as_believed(knob, predicted[config], evidence)
            for config, knob in changed.items()
            if config in predicted and config not in measured
        ),
    ]
    found.sort(key=lambda each: (list(each.config).index(each.knob), not each.fits, -(each.samples_per_second or 0.0)))
    kept: dict[tuple[str, object], Alternative] = {}
    for each in found:  # some differ, too, in what has a meaning only beside the new value
        kept.setdefault((each.knob, each.value), each)
    return tuple(kept.values())


def _as_measured(knob: str, measurement: Measurement, evidence: Evidence) -> Alternative:
    size = measurement.peak_bytes.held_bytes if measurement.peak_bytes else None
    told = measurement.fits or (size is not None and size > evidence.usable_bytes)
    return Alternative(
        knob,
        measurement.config,
        measurement.outcome,
        peak_bytes=size if told else None,
        samples_per_second=measurement.samples_per_second,
        tokens_per_second=measurement.tokens_per_second,
        measured=True,
    )


def _as_believed(knob: str, point: Point, evidence: Evidence) -> Alternative:
    return Alternative(
        knob,
        point.config,
        Outcome.FITS if point.peak_bytes <= evidence.usable_bytes else Outcome.OUT_OF_MEMORY,
        peak_bytes=point.peak_bytes,
        samples_per_second=point.samples_per_second,
        tokens_per_second=point.tokens_per_second,
        measured=False,
    )
