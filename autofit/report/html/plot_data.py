"""The data of the pictures: every measured config with its throughput and memory, brought to one level."""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree

from autofit.core.measurement import Measurement
from autofit.core.record import Predicted, Record
from autofit.core.result import Result, tier
from autofit.report.formatting import OUTCOMES, describe, gib, number, peak_bytes
from autofit.report.html.svg import At, Picture
from autofit.report.rows import latest_by_config, relative_speed


@dataclass(frozen=True)
class Plotted:
    """A measured config: the number of its first trial, its latest measurement, and where that stands."""

    number: int
    measurement: Measurement
    tier: str
    rate: float | None
    nbytes: int | None
    predicted: Predicted


def plotted(record: Record) -> list[Plotted]:
    """Every measured config by its latest measurement, in the order of the trials."""
    result = record.result
    latest = latest_by_config(result)
    first = {trial.config: index for index, trial in reversed(list(enumerate(result.trials)))}
    configs = []
    for config, index in sorted(first.items(), key=lambda item: item[1]):
        measurement = latest[config]
        rate = leveled(measurement, result) if measurement.fits else None
        predicted = record.predicted[index] if record.predicted else Predicted()
        number_of_trial = result.trials[index].number
        configs.append(Plotted(number_of_trial, measurement, tier(config), rate, peak_bytes(measurement), predicted))
    return configs


def leveled(measurement: Measurement, result: Result) -> float:
    """Throughput in the result's unit; of what was only explored, relative to the best as it was when explored."""
    if result.best is None:
        return measurement.throughput * per_sample(result)
    return relative_speed(measurement, result) * result.best.throughput * per_sample(result)


def per_sample(result: Result) -> float:
    """Units of throughput in a sample: its tokens where tokens are counted."""
    for one in (result.best, *result.trials):
        if one and one.tokens_per_second and one.samples_per_second:
            return one.tokens_per_second / one.samples_per_second
    return 1.0


def unit(result: Result) -> str:
    """What throughput counts."""
    return "tokens" if any(trial.tokens_per_second for trial in result.trials) else "samples"


def hover_text(one: Plotted, result: Result) -> str:
    """A measured config in one line."""
    fits = one.measurement.fits
    figures = [f"{number(one.rate)} {unit(result)}/s" if one.rate else OUTCOMES[one.measurement.outcome]]
    if one.nbytes:
        figures.append(f"{'' if fits else 'had taken '}{gib(one.nbytes)} GiB")
    return " \u2014 ".join([f"probe {one.number + 1}: {describe(one.measurement.config)}", *figures])


def link(picture: Picture, number_of_trial: int, title: str, kind: str) -> ElementTree.Element:
    """A link to the row of a trial, for what is drawn into it."""
    element = picture.draw("a", href=f"#trial-{number_of_trial}", kind=kind, tabindex=-1)
    picture.draw("title", title, into=element)
    return element


def shape(picture: Picture, into: ElementTree.Element, name: str, at: At, radius: float) -> None:
    """Draw the mark of a tier: a circle, a triangle or a square."""
    x, y = at
    if name == "full":
        picture.draw("circle", into=into, cx=x, cy=y, r=radius)
    elif name == "lora":
        wide, high = radius * 1.15, radius * 1.2
        picture.draw("path", into=into, d=f"M{x:.1f},{y - high:.1f}l{wide:.1f},{2 * high - 1:.1f}h{-2 * wide:.1f}z")
    else:
        picture.draw("rect", into=into, x=x - radius * 0.9, y=y - radius * 0.9, width=radius * 1.8, height=radius * 1.8)
