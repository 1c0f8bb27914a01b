"""The first screen of the page: what won, how fast, in how much memory, and how to train with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.estimate import Estimate
from autofit.core.measurement import Measurement, StepSeconds
from autofit.core.result import Result
from autofit.report.formatting import gib, interval, number, peak_bytes, percent

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


def speed_words(best: Measurement | Estimate) -> dict[str, str]:
    """Throughput and step time."""
    kind = "tokens" if best.tokens_per_second else "samples"
    figure, step = best.tokens_per_second or best.samples_per_second or 0.0, best.step_seconds
    if isinstance(step, StepSeconds):
        words = f"{step.median:.3g} s a step (95 %: {step.low:.3g} to {step.high:.3g})"
    else:
        words = f"about {step:.3g} s a step" if step else ""
    return {"rate": number(figure) if figure else "?", "unit": f"{kind} per second", "step": words}


def proof(best: Measurement | Estimate) -> str:
    """How the figures came about."""
    if isinstance(best, Estimate):
        return "predicted, not measured"
    return "verified in longer runs" if best.verified else "not verified"


def memory_bar(best: Measurement | Estimate, result: Result) -> Bar | None:
    """The peak against the budget, of a prediction its upper end; None where it was not watched."""
    peak = best.high if isinstance(best, Estimate) else peak_bytes(best)
    if peak is None:
        return None
    budget = result.budget.device_bytes
    usable = result.budget.cap_bytes(result.hardware.device)
    told = interval(best) if isinstance(best, Estimate) else gib(peak)
    words = f"{told} of {gib(budget)} GiB, {percent(peak / budget)}"
    return Bar(told, gib(usable), gib(budget), min(100.0, 100 * peak / budget), 100 * usable / budget, words)


def duration(best: Measurement | Estimate) -> dict[str, Any] | None:
    """What the page computes hours from: units per second, and a round number of them to begin with."""
    kind = "tokens" if best.tokens_per_second else "samples"
    rate = best.tokens_per_second or best.samples_per_second
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
