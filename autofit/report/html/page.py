"""The whole page: one file without a network, from a record and what lies in its run directory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autofit.core.errors import counted
from autofit.core.estimate import Estimate
from autofit.core.measurement import Measurement, Outcome, StepSeconds
from autofit.core.record import Record
from autofit.core.result import Result, tier
from autofit.report.explain import summary
from autofit.report.formatting import TIER_TITLES, gib, interval, number, peak_bytes, percent, throughput, values, where
from autofit.report.html.charts import knob_picture, memory_error, prediction_error, progress, step_error
from autofit.report.html.knob_names import config_rows, off_knobs
from autofit.report.html.memory import (
    KIND_WORDS,
    breakdown,
    moments_json,
    timeline_picture,
    timeline_words,
    traced_tiers,
)
from autofit.report.html.scatter import scatter
from autofit.report.html.svg import Picture
from autofit.report.html.trials import columns, shared, trials
from autofit.report.knob_effects import knob_lines
from autofit.report.next_steps import commands
from autofit.report.nothing_fits import nothing_fits_lines
from autofit.report.other_budgets import other_budget_lines
from autofit.report.predicted import answer_line, predicted_lines
from autofit.report.rows import explored_at

_WIDE, _NARROW = 720, 360
_MARKS = {"full": "\u25cf", "lora": "\u25b2", "qlora": "\u25a0"}
_EXPORT_CHARACTERS = 100_000  # of one file; what is longer is for an editor


def report_page(record: Record, directory: Path) -> str:
    """The HTML of report.html."""
    result = record.result
    return _template().render(
        style=Markup(picture_style() + _read("page.css")),
        script=Markup(_read("page.js")),
        record=record,
        result=result,
        place=where(result.hardware, result.budget),
        answer=_answer(record, directory),
        nothing=None if result.config else nothing_fits_lines(result),
        scatter=_both(scatter(record, _WIDE), scatter(record, _NARROW)),
        tiers=_tiers(result),
        ran_out=any(trial.outcome is Outcome.OUT_OF_MEMORY for trial in result.trials),
        breakdown=_both(breakdown(record, _WIDE), breakdown(record, _NARROW)),
        timelines=[
            {
                "picture": _both(timeline_picture(record, name, _WIDE), timeline_picture(record, name, _NARROW)),
                "words": timeline_words(record, name),
                "moments": Markup(moments_json(timeline)),  # numbers, and words of this page
                "timed": timeline.timed,
            }
            for name, (timeline, _) in traced_tiers(record).items()
        ],
        kinds=KIND_WORDS,
        errors=[_inline(memory_error(record)), _inline(step_error(record))],
        error_words=prediction_error(record),
        progress=[_inline(progress(record, by=unit)) for unit in ("probe", "minute")],
        knob_picture=_both(knob_picture(record, _WIDE), knob_picture(record, _NARROW)),
        knobs=knob_lines(result),
        others=other_budget_lines(result),
        summary=summary(result),
        facts=_facts(record),
        columns=columns(record),
        trials=trials(record, directory),
        shared=shared(record),
        explored_at=explored_at(result, result.trials),
    )


def pictures(record: Record) -> dict[str, Picture]:
    """Every picture of the page by the name of its file, without the empty ones."""
    drawn = {
        "throughput-against-memory": scatter(record),
        "memory-breakdown": breakdown(record),
        "what-knobs-buy": knob_picture(record),
        **{f"memory-timeline-{name}": timeline_picture(record, name) for name in traced_tiers(record)},
        "memory-predictions": memory_error(record),
        "step-predictions": step_error(record),
        "progress-by-probe": progress(record, by="probe"),
        "progress-by-time": progress(record, by="minute"),
    }
    return {name: picture for name, picture in drawn.items() if picture is not None}


def picture_style(*, alone: bool = False) -> str:
    """The colours and how pictures look. One that stands alone is light, its colours written out: converters know no
    variables."""
    colours, look = _read("colours.css"), _read("picture.css")
    if not alone:
        return colours + _read("dark.css") + look
    for name, colour in re.findall(r"--([\w-]+): *([^;]+);", colours):
        look = look.replace(f"var(--{name})", colour)
    return look


@dataclass(frozen=True)
class MemoryBar:
    """Memory against the budget, in percent of what the bar shows."""

    used: str
    usable: str
    budget: str
    used_percent: float
    usable_percent: float
    label: str


def memory_bar(best: Measurement | Estimate, result: Result) -> MemoryBar | None:
    """The peak against the budget, of a prediction its upper end; None where it was not watched."""
    peak = best.high if isinstance(best, Estimate) else peak_bytes(best)
    if peak is None:
        return None
    budget, usable = result.budget.device_bytes, result.budget.cap_bytes(result.hardware.device)
    used = interval(best.low, best.high) if isinstance(best, Estimate) else gib(peak)
    label = f"{used} of {gib(budget)} GiB, {percent(peak / budget)}"
    return MemoryBar(used, gib(usable), gib(budget), min(100.0, 100 * peak / budget), 100 * usable / budget, label)


def step_words(best: Measurement | Estimate) -> str:
    """The time of a step; empty where it is unknown."""
    step = best.step_seconds
    if isinstance(step, StepSeconds):
        return f"{step.median:.3g} s a step (95 %: {step.low:.3g} to {step.high:.3g})"
    return f"about {step:.3g} s a step" if step else ""


def training_time(seconds: float) -> str:
    """A time to train in the unit that fits it."""
    for least, size, name in ((172_800, 86_400, "days"), (5400, 3600, "hours"), (90, 60, "minutes")):
        if seconds >= least:
            return f"{seconds / size:.3g} {name}" if seconds / size < 1000 else f"{seconds / size:,.0f} {name}"
    return f"{seconds:.3g} seconds"


def _answer(record: Record, directory: Path) -> dict[str, Any] | None:
    result, best = record.result, record.result.best or record.result.predicted_best
    if best is None:
        return None
    rate, unit = throughput(best)
    amount = 1_000_000_000 if unit == "tokens" else 1_000_000
    if isinstance(best, Estimate):
        lines = [f"Predicted, not measured: {answer_line(result, best)}", *predicted_lines(result, best)]
        proof = "predicted, not measured"
    else:
        lines, proof = [], "verified in longer runs" if best.verified else "not verified"
    return {
        "lines": lines,
        "rate": number(rate) if rate else "?",
        "unit": unit,
        "step": step_words(best),
        "proof": proof,
        "bar": memory_bar(best, result),
        "rows": config_rows(best.config),
        "off": off_knobs(best.config),
        "duration": {"rate": rate, "amount": amount, "words": training_time(amount / rate)} if rate else None,
        "commands": commands(result, directory),
        "exports": _exports(directory / "exports"),
    }


def _exports(folder: Path) -> list[tuple[str, str]]:
    """(path, text) of the files for other tools that the run directory holds."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    texts = ((path, path.read_text(encoding="utf-8", errors="replace")) for path in paths)
    return [(str(path.relative_to(folder)), text) for path, text in texts if len(text) <= _EXPORT_CHARACTERS]


def _tiers(result: Result) -> list[tuple[str, str, str]]:
    """(name, mark, title) of each tier that is drawn."""
    drawn = {tier(trial.config) for trial in result.trials} | {
        name for name, points in result.frontier.items() if points
    }
    return [(name, mark, TIER_TITLES[name]) for name, mark in _MARKS.items() if name in drawn]


def _facts(record: Record) -> dict[str, str]:
    """The machine, the versions and the seed: what one must know to measure the same again."""
    result, options, hardware, workload = record.result, record.options, record.result.hardware, record.result.workload
    length = f", {workload['sequence_length']} tokens each" if workload.get("sequence_length") else ""
    samples = counted(workload.get("effective_batch_size", 0), "sample")
    margin = "" if hardware.device == "cpu" else f", {result.budget.margin * 100:.0f} % of it kept free"
    facts = {
        "model": result.model,
        "workload": f"{workload.get('task')}, {samples} a step{length}",
        "device": f"{hardware.name}, {gib(hardware.memory_bytes)} GiB",
        "measured on": hardware.measured_on or "",
        "budget": f"{gib(result.budget.device_bytes)} GiB{margin}",
        "host": f"{counted(hardware.cores, 'core')}, {gib(hardware.host_memory_bytes)} GiB",
        "space": f"{options.get('space') or 'default'}, {counted(result.space_size, 'config')}",
        "settings": ", ".join(f"{knob}={values(given)}" for knob, given in (options.get("set") or {}).items()),
        "workers": str(options.get("workers") or ""),
        "seed": str(options.get("seed", "")),
        "tolerance": f"{record.tolerance * 100:.0f} %",
        "finished": record.finished.replace("T", " "),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    return {name: words for name, words in facts.items() if words}


def _both(wide: Picture | None, narrow: Picture | None) -> Markup | None:
    """A picture for a large page and for a small one, of which the style shows one."""
    if wide is None or narrow is None:
        return None
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(_inline(wide), _inline(narrow))


def _inline(picture: Picture | None) -> Markup | None:
    return Markup(picture.markup()) if picture else None  # ElementTree has escaped what is in it


def _read(name: str) -> str:
    """A file beside this one."""
    return (resources.files("autofit.report.html") / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_read("page.html"))
