"""The whole page: one file without a network, from a record and what lies in its run directory."""

import contextlib
import functools
import json
import re
import stat
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from autofit.core.errors import pluralize
from autofit.core.estimate import Estimate
from autofit.core.measurement import Measurement, StepSeconds
from autofit.core.quoting import xml_text
from autofit.core.record import Predicted, Record
from autofit.core.result import Result, tier
from autofit.report import formatting as fmt
from autofit.report.explain import nothing_fits_lines, summary
from autofit.report.html.charts import (
    devices_picture,
    error_picture,
    error_words,
    knob_picture,
    progress,
)
from autofit.report.html.knob_names import config_rows, off_knobs
from autofit.report.html.learning import learning_picture
from autofit.report.html.memory import (
    KIND_WORDS,
    breakdown,
    moments,
    timeline_picture,
    timeline_words,
    traced_tiers,
)
from autofit.report.html.scatter import scatter
from autofit.report.html.svg import Picture
from autofit.report.knob_effects import knob_lines
from autofit.report.next_steps import commands
from autofit.report.other_budgets import other_budget_lines
from autofit.report.predicted import answer_line, predicted_lines
from autofit.report.rows import drawn_trials, explored_at

_MARKS = {"full": "\u25cf", "lora": "\u25b2", "qlora": "\u25a0", "head": "\u25c6"}
_EXPORT_BYTES = 100_000  # of one file; what is longer is for an editor
_MOST_EXPORTS = 100  # files and directories
_UNITS_OF_TIME = ((172_800, 86_400, "days"), (5400, 3600, "hours"), (90, 60, "minutes"))


def report_page(record: Record, directory: Path) -> str:
    """The HTML of report.html."""
    result = record.result
    best = result.best or result.predicted_best
    lines: list[str] = []
    if result.config is None:
        lines = nothing_fits_lines(result)
    elif isinstance(best, Estimate):
        answer = f"Predicted, not measured: {answer_line(result, best)}"
        lines = [answer, *predicted_lines(result, best)]

    rate = 0.0
    unit = ""
    if best:
        rate, unit = fmt.throughput(best)
    amount = 1_000_000  # to train on, to begin with
    if unit == "tokens":
        amount = 1_000_000_000

    return _template().render(
        record=record,
        result=result,
        directory=directory,
        best=best,
        lines=lines,
        rate=rate,
        unit=unit,
        amount=amount,
        style=Markup(picture_style() + _read("page.css")),
        script=Markup(_read("page.js")),
    )


def pictures(record: Record) -> dict[str, Picture]:
    """Every picture of the page by the name of its file, without the empty ones."""
    drawn = {
        "throughput-against-memory": scatter(record),
        "memory-breakdown": breakdown(record),
        "what-knobs-buy": knob_picture(record),
    }
    for name in traced_tiers(record):
        drawn[f"memory-timeline-{name}"] = timeline_picture(record, name)
    drawn |= {
        "loss-by-seconds": learning_picture(record),
        "memory-by-devices": devices_picture(record, "memory"),
        "speed-by-devices": devices_picture(record, "speed"),
        "memory-predictions": error_picture(record, "memory"),
        "step-predictions": error_picture(record, "step"),
        "progress-by-probe": progress(record, by="probe"),
        "progress-by-time": progress(record, by="minute"),
    }

    return {name: picture for name, picture in drawn.items() if picture is not None}


def picture_style(*, alone: bool = False) -> str:
    """The colours and how pictures look.

    One that stands alone is light, its colours written out: converters know no variables.
    """
    colours = _read("colours.css")
    look = _read("picture.css")
    if not alone:
        return colours + _read("dark.css") + look

    for name, colour in re.findall(r"--([\w-]+): *([^;]+);", colours):
        look = look.replace(f"var(--{name})", colour)
    return look


def memory_used(best: Measurement | Estimate, result: Result) -> tuple[str, float] | None:
    """The peak in GiB, and its share of the budget, of a prediction at its upper end.

    None where it was not watched.
    """
    budget = result.budget.device_bytes
    if isinstance(best, Estimate):
        return fmt.interval(best.low, best.high), best.high / budget

    peak = fmt.peak_bytes(best)
    if peak is None:
        return None
    return fmt.gib(peak), peak / budget


def step_words(best: Measurement | Estimate) -> str:
    """The time of a step; empty where it is unknown."""
    step = best.step_seconds
    if not step:
        return ""
    if isinstance(step, StepSeconds):
        return f"{step.median:.3g} s a step (95 %: {step.low:.3g} to {step.high:.3g})"

    return f"about {step:.3g} s a step"


def training_time(seconds: float) -> str:
    """A time to train in the unit that fits it."""
    for least, size, name in _UNITS_OF_TIME:
        if seconds < least:
            continue
        count = seconds / size
        if count < 1000:
            return f"{count:.3g} {name}"

        return f"{count:,.0f} {name}"

    return f"{seconds:.3g} seconds"


def _exports(folder: Path) -> list[tuple[str, str]]:
    """(path, text) of the files for other tools that the run directory itself holds: what a link
    names is not of it."""
    if folder.is_symlink():
        return []

    texts = []
    for path in sorted(folder.rglob("*"))[:_MOST_EXPORTS]:
        with contextlib.suppress(OSError):  # not ours to read: the page does without
            status = path.lstat()
            is_short_file = stat.S_ISREG(status.st_mode) and status.st_size <= _EXPORT_BYTES
            if is_short_file and not path.name.startswith("."):
                text = path.read_text(encoding="utf-8", errors="replace")
                texts.append((str(path.relative_to(folder)), text))

    return texts


def _trials(
    record: Record, directory: Path
) -> list[tuple[Measurement, Measurement, Predicted | None, str | None]]:
    """Every trial that is drawn with the latest measurement of its config, its prediction, and its
    log."""
    result = record.result
    rows = []
    for place in drawn_trials(result):
        trial = result.trials[place]
        latest = result.latest_by_config[trial.config]
        predicted = record.predicted[place] if record.predicted else None
        log = f"probes/{trial.number:04d}.log"
        has_log = (directory / log).is_file()
        rows.append((trial, latest, predicted, log if has_log else None))

    return rows


def _further_trials(record: Record, differing: Sequence[str]) -> str:
    """What the table shows of all other trials when it is asked to, as JSON; a config is the places
    of its words."""
    result = record.result
    words: dict[str, int] = {}
    rows = []
    drawn = set(drawn_trials(result))
    for place, trial in enumerate(result.trials):
        if place in drawn:
            continue

        config = fmt.describe(trial.config, differing) or fmt.describe(trial.config)
        places = [words.setdefault(word, len(words)) for word in config.split(", ")]
        latest = result.latest_by_config[trial.config]
        step = trial.step_seconds
        row: list[Any] = [
            trial.number + 1,
            places,
            tier(trial.config),
            trial.outcome.value,
            _rate(trial) if trial.fits else "",
            _rate(latest) if latest.verified else "",
            f"{step.median:.3g}" if step else "",
            fmt.peak_gib(trial),
        ]
        if record.predicted:
            predicted = record.predicted[place]
            nbytes = predicted.allocated_bytes
            seconds = predicted.step_seconds
            row.append(fmt.gib(int(nbytes)) if nbytes else "")
            row.append(f"{seconds:.3g}" if seconds else "")

        row.append(f"{trial.seconds:.1f}")
        rows.append(row)

    data = {
        "words": list(words),
        "tiers": fmt.TIER_TITLES,
        "outcomes": {outcome.value: name for outcome, name in fmt.OUTCOMES.items()},
        "rows": rows,
    }

    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _rate(measurement: Measurement) -> str:
    figure, _ = fmt.throughput(measurement)
    return fmt.number(figure)


def shared_knobs(result: Result) -> str:
    """The knobs that all trials have on, in a few words; empty where there is none, or only one
    trial."""
    if len(result.trials) < 2:
        return ""

    config = result.trials[0].config
    differing = fmt.knobs_that_differ(trial.config for trial in result.trials)
    on = config.keys() - off_knobs(config) - set(differing)
    if not on:
        return ""

    return fmt.describe(config, on)


def _tiers(result: Result) -> list[tuple[str, str, str]]:
    """(name, mark, title) of each tier that is drawn."""
    drawn = {tier(trial.config) for trial in result.trials}
    drawn |= {name for name, points in result.frontier.items() if points}

    tiers = []
    for name, mark in _MARKS.items():
        if name in drawn:
            tiers.append((name, mark, fmt.TIER_TITLES[name]))

    return tiers


def _inline(draw: Callable[..., Picture | None], record: Record, *given: object) -> Markup | None:
    """A picture as a part of the page; None where there is none."""
    picture = draw(record, *given)
    if picture is None:
        return None

    return Markup(picture.markup())  # ElementTree has escaped what is in it


def _both(draw: Callable[..., Picture | None], record: Record, *given: object) -> Markup | None:
    """A picture for a large page and for a small one, of which the style shows one."""
    wide = _inline(draw, record, *given, 720)
    if wide is None:
        return None
    narrow = _inline(draw, record, *given, 360)

    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(wide, narrow)


def _read(name: str) -> str:
    return (resources.files("autofit.report.html") / name).read_text(encoding="utf-8")


def _finalized(value: object) -> object:
    """What the page shows of a value, before it is escaped."""
    return xml_text(value) if type(value) is str else value


@functools.cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_finalized,
    )
    functions: tuple[Callable[..., Any], ...] = (
        breakdown,
        commands,
        config_rows,
        devices_picture,
        error_picture,
        error_words,
        explored_at,
        knob_lines,
        knob_picture,
        learning_picture,
        memory_used,
        moments,
        off_knobs,
        other_budget_lines,
        pluralize,
        progress,
        scatter,
        shared_knobs,
        step_words,
        summary,
        tier,
        timeline_picture,
        timeline_words,
        traced_tiers,
        training_time,
    )
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {
        "text": fmt,
        "kinds": KIND_WORDS,
        "picture": _inline,
        "pictures": _both,
        "tiers": _tiers,
        "trials": _trials,
        "further_trials": _further_trials,
        "exports": _exports,
    }

    return environment.from_string(_read("page.html"))
