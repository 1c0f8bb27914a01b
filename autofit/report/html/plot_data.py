"""What pictures show of a search: every measured config with its throughput and memory, brought to one level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Point
from autofit.core.record import Predicted, Record
from autofit.core.result import Result, tier
from autofit.report.formatting import OUTCOMES, describe, gib, number, peak_bytes
from autofit.report.rows import latest_by_config, relative_speed

TITLES = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
MARKS = {"full": "\u25cf", "lora": "\u25b2", "qlora": "\u25a0"}


@dataclass(frozen=True)
class Plotted:
    """A measured config: the number of its first trial, its latest measurement, and where that stands."""

    number: int
    measurement: Measurement
    tier: str
    rate: float | None
    nbytes: int | None
    predicted: Predicted

    @property
    def ran_out(self) -> bool:
        return self.measurement.outcome is Outcome.OUT_OF_MEMORY


def plotted(record: Record) -> list[Plotted]:
    """Every config that was measured, by its latest measurement, in the order of the trials."""
    result = record.result
    latest = latest_by_config(result)
    first = {each.config: place for place, each in reversed(list(enumerate(result.trials)))}
    found = []
    for config, place in sorted(first.items(), key=lambda each: each[1]):
        measurement = latest[config]
        found.append(
            Plotted(
                result.trials[place].number,
                measurement,
                tier(config),
                levelled(measurement, result) if measurement.fits else None,
                peak_bytes(measurement),
                record.predicted[place] if record.predicted else Predicted(),
            )
        )
    return found


def levelled(measurement: Measurement, result: Result) -> float:
    """Throughput in the result's unit; what was only explored as against the best when that was explored."""
    if result.best is None:
        return measurement.throughput * per_sample(result)
    return relative_speed(measurement, result) * result.best.throughput * per_sample(result)


def per_sample(result: Result) -> float:
    """Units of throughput in a sample: its tokens where tokens are counted."""
    for each in (result.best, *result.trials):
        if each and each.tokens_per_second and each.samples_per_second:
            return each.tokens_per_second / each.samples_per_second
    return 1.0


def unit(result: Result) -> str:
    """What throughput counts."""
    return "tokens" if any(each.tokens_per_second for each in result.trials) else "samples"


def measured_points(each: list[Plotted], result: Result) -> Iterator[Point]:
    """Those that fit, as points of a frontier."""
    for one in each:
        if one.rate and one.nbytes:
            rate = one.rate / per_sample(result)
            yield Point(one.measurement.config, one.nbytes, rate, None, measured=True)


def told(one: Plotted, result: Result) -> str:
    """A measured config in one line, for who hovers over it."""
    measurement = one.measurement
    words = [f"probe {one.number + 1}: {describe(measurement.config)}"]
    if one.rate:
        words.append(f"{number(one.rate)} {unit(result)}/s")
    else:
        words.append(OUTCOMES[measurement.outcome])
    if one.nbytes:
        words.append(f"{'' if measurement.fits else 'had taken '}{gib(one.nbytes)} GiB")
    return " \u2014 ".join(words)
