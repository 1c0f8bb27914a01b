"""The whole page: one file without a network, from a record and what lies in its run directory."""

from __future__ import annotations

import functools
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autofit.core.errors import counted
from autofit.core.estimate import Estimate
from autofit.core.measurement import Outcome
from autofit.core.record import Record
from autofit.core.result import Result, tier
from autofit.report.explain import summary
from autofit.report.foretold import answer_line, foretold_lines
from autofit.report.formatting import gib, where
from autofit.report.html.knob_names import config_rows, off_knobs
from autofit.report.html.knobs import knob_picture
from autofit.report.html.memory import (
    KIND_WORDS,
    breakdown,
    followed_tiers,
    followed_words,
    moments_json,
    timeline_picture,
)
from autofit.report.html.plot_data import MARKS, TITLES
from autofit.report.html.prediction_error import agreement_words, memory_agreement, step_agreement
from autofit.report.html.progress import progress
from autofit.report.html.scatter import scatter
from autofit.report.html.summary import duration, exports, memory_bar, proof, speed_words
from autofit.report.html.svg import Picture
from autofit.report.html.trials import columns, shared, trials
from autofit.report.knob_effects import knob_lines
from autofit.report.next_steps import commands
from autofit.report.nothing_fits import nothing_fits_lines
from autofit.report.other_budgets import other_budget_lines
from autofit.report.rows import explored_at

WIDE, NARROW = 720, 360
_HOME = "autofit.report.html"


def report_page(record: Record, directory: Path) -> str:
    """The HTML of report.html."""
    result = record.result
    return _template().render(
        style=Markup(picture_style() + read("page.css")),
        script=Markup(read("page.js")),
        record=record,
        result=result,
        place=where(result.hardware, result.budget),
        answer=_answer(record, directory),
        nothing=None if result.config else nothing_fits_lines(result),
        scatter=_both(scatter(record, WIDE), scatter(record, NARROW)),
        tiers=_tiers(result),
        ran_out=any(each.outcome is Outcome.OUT_OF_MEMORY for each in result.trials),
        breakdown=_both(breakdown(record, WIDE), breakdown(record, NARROW)),
        timelines=_timelines(record),
        kinds=KIND_WORDS,
        agreement=[_inline(memory_agreement(record)), _inline(step_agreement(record))],
        agreement_words=agreement_words(record),
        progress=[_inline(progress(record, by=each)) for each in ("probe", "minute")],
        knob_picture=_both(knob_picture(record, WIDE), knob_picture(record, NARROW)),
        knobs=knob_lines(result),
        others=other_budget_lines(result),
        summary=summary(result),
        facts=facts(record),
        columns=columns(record),
        trials=trials(record, directory),
        shared=shared(record),
        explored_at=explored_at(result, result.trials),
    )


def pictures(record: Record) -> dict[str, Picture]:
    """Every picture of the page by the name of its file, those that there is something for."""
    found = {
        "throughput-against-memory": scatter(record),
        "memory-breakdown": breakdown(record),
        "what-knobs-buy": knob_picture(record),
        **{f"memory-timeline-{name}": timeline_picture(record, name) for name in followed_tiers(record)},
        "memory-predictions": memory_agreement(record),
        "step-predictions": step_agreement(record),
        "progress-by-probe": progress(record, by="probe"),
        "progress-by-time": progress(record, by="minute"),
    }
    return {name: picture for name, picture in found.items() if picture is not None}


def facts(record: Record) -> dict[str, str]:
    """The machine, the versions and the seed: what one must know to measure the same again."""
    result, options = record.result, record.options
    hardware = result.hardware
    told = {
        "model": result.model,
        "workload": _workload(result),
        "device": f"{hardware.name}, {gib(hardware.memory_bytes)} GiB",
        "measured on": hardware.measured_on or "",
        "budget": f"{gib(result.budget.device_bytes)} GiB" + _margin(result),
        "host": f"{counted(hardware.cores, 'core')}, {gib(hardware.host_memory_bytes)} GiB",
        "space": f"{options.get('space') or 'default'}, {counted(result.space_size, 'config')}",
        "settings": ", ".join(f"{knob}={_values(given)}" for knob, given in (options.get("set") or {}).items()),
        "workers": str(options.get("workers") or ""),
        "seed": str(options.get("seed", "")),
        "tolerance": f"{record.tolerance:.0%}".replace("%", " %"),
        "finished": record.finished.replace("T", " "),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    return {name: words for name, words in told.items() if words}


def read(name: str) -> str:
    """A file that lies beside this one."""
    return (resources.files(_HOME) / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(read("page.html"))


def _answer(record: Record, directory: Path) -> dict[str, Any] | None:
    result, best = record.result, record.result.best or record.result.predicted_best
    if best is None:
        return None
    return {
        "said": _foretold(result, best) if isinstance(best, Estimate) else [],
        "speed": speed_words(best),
        "proof": proof(best),
        "bar": memory_bar(best, result),
        "rows": config_rows(best.config),
        "off": off_knobs(best.config),
        "duration": duration(best),
        "commands": commands(record.result, directory),
        "exports": exports(directory),
    }


def _foretold(result: Result, best: Estimate) -> list[str]:
    return [f"Predicted, not measured: {answer_line(result, best)}", *foretold_lines(result, best)]


def _tiers(result: Result) -> list[tuple[str, str, str]]:
    """(name, mark, words) of each tier that is drawn."""
    drawn = {tier(each.config) for each in result.trials} | {name for name, points in result.frontier.items() if points}
    return [(name, mark, TITLES[name]) for name, mark in MARKS.items() if name in drawn]


def _timelines(record: Record) -> list[dict[str, Any]]:
    return [
        {
            "picture": _both(timeline_picture(record, name, WIDE), timeline_picture(record, name, NARROW)),
            "words": followed_words(record, name),
            "moments": Markup(moments_json(record.timelines[name])),  # numbers, and words of this page
            "timed": record.timelines[name].timed,
        }
        for name in followed_tiers(record)
    ]


def _both(wide: Picture | None, narrow: Picture | None) -> Markup | None:
    """A picture for a large page and for a small one, of which the style shows one."""
    if wide is None or narrow is None:
        return None
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(_inline(wide), _inline(narrow))


def _inline(picture: Picture | None) -> Markup | None:
    return Markup(picture.markup()) if picture else None  # ElementTree has escaped what is in it


def _workload(result: Result) -> str:
    told = result.workload
    length = f", {told['sequence_length']} tokens each" if told.get("sequence_length") else ""
    return f"{told.get('task')}, {counted(told.get('effective_batch_size', 0), 'sample')} a step{length}"


def _margin(result: Result) -> str:
    on_cpu = result.hardware.device == "cpu"
    return "" if on_cpu else f", {result.budget.margin:.0%} of it kept free".replace("%", " %")


def _values(given: Any) -> str:
    return ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)


def picture_style(*, alone: bool = False) -> str:
    """The colours and how pictures look. One that stands alone is light, its colours written out: converters know no
    variables."""
    colours, look = read("colours.css"), read("picture.css")
    if not alone:
        return colours + read("dark.css") + look
    for name, colour in re.findall(r"--([\w-]+): *([^;]+);", colours):
        look = look.replace(f"var(--{name})", colour)
    return look
