"""The first screen of the page: what won, how fast, in how much memory, and how to train with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report.html.plotted import unit
from autofit.report.words import gib, number, peak_bytes, percent

_EXPORT_CHARACTERS = 100_000  # of one file; what is longer is for an editor
_UNITS = {"tokens": 1_000_000_000, "samples": 1_000_000}


@dataclass(frozen=True)
class Bar:
    """Memory against the budget, in percent of what the bar shows."""

    used: str
    usable: str
    budget: str
    used_percent: float
    usable_percent: float
    label: str


@dataclass(frozen=True)
class Export:
    """A file for another tool, as it lies in the run directory."""

    name: str
    text: str


def speed_words(best: Measurement) -> dict[str, str]:
    """Throughput and step time."""
    kind = "tokens" if best.tokens_per_second else "samples"
    step = best.step_seconds
    interval = f"{step.median:.3g} s a step (95 %: {step.low:.3g} to {step.high:.3g})" if step else ""
    return {"rate": number(best.tokens_per_second or best.throughput), "unit": f"{kind} per second", "step": interval}


def memory_bar(best: Measurement, result: Result) -> Bar | None:
    """The peak against the budget; None where it was not watched."""
    peak = peak_bytes(best)
    if peak is None:
        return None
    budget = result.budget.device_bytes
    usable = result.budget.cap_bytes(result.hardware.device)
    words = f"{gib(peak)} of {gib(budget)} GiB, {percent(peak / budget)}"
    return Bar(gib(peak), gib(usable), gib(budget), min(100.0, 100 * peak / budget), 100 * usable / budget, words)


def duration(best: Measurement, result: Result) -> dict[str, Any] | None:
    """What the page computes hours from: units per second, and a round number of them to begin with."""
    kind = unit(result)
    rate = best.tokens_per_second if kind == "tokens" else best.samples_per_second
    if not rate:
        return None
    amount = _UNITS[kind]
    return {"rate": rate, "unit": kind, "amount": amount, "words": hours(amount / rate)}


def hours(seconds: float) -> str:
    """A time to train in the unit that fits it."""
    for least, size, name in ((172_800, 86_400, "days"), (5400, 3600, "hours"), (90, 60, "minutes")):
        if seconds >= least:
            return f"{seconds / size:.3g} {name}" if seconds / size < 1000 else f"{seconds / size:,.0f} {name}"
    return f"{seconds:.3g} seconds"


def exports(directory: Path) -> list[Export]:
    """The files for other tools that the run directory holds."""
    folder = directory / "exports"
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) <= _EXPORT_CHARACTERS:
            found.append(Export(str(path.relative_to(folder)), text))
    return found
