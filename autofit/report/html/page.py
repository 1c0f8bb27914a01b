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
from autofit.report import formatting
from autofit.report.explain import nothing_fits_lines, summary
from autofit.report.formatting import (
    describe,
    gib,
    interval,
    knobs_that_differ,
    peak_bytes,
    throughput,
)
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


def report_page(record: Record, directory: Path) -> str:
    """The HTML of report.html."""
    result, best = record.result, record.result.best or record.result.predicted_best
    lines: list[str] = []
    if result.config is None:
        lines = nothing_fits_lines(result)
    elif isinstance(best, Estimate):
        lines = [
            f"Predicted, not measured: {answer_line(result, best)}",
            *predicted_lines(result, best),
        ]
    rate, unit = throughput(best) if best else (0.0, "")
    amount = 1_000_000_000 if unit == "tokens" else 1_000_000  # to begin with
    style, script = Markup(picture_style() + _read("page.css")), Markup(_read("page.js"))
    figures = {"best": best, "lines": lines, "rate": rate, "unit": unit, "amount": amount}
    return _template().render(
        figures, style=style, script=script, record=record, result=result, directory=directory
    )


def pictures(record: Record) -> dict[str, Picture]:
    """Every picture of the page by the name of its file, without the empty ones."""
    drawn = {
        "throughput-against-memory": scatter(record),
        "memory-breakdown": breakdown(record),
        "what-knobs-buy": knob_picture(record),
        **{
            f"memory-timeline-{name}": timeline_picture(record, name)
            for name in traced_tiers(record)
        },
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
    """The colours and how pictures look. One that stands alone is light, its colours written out: converters know no
    variables."""
    colours, look = _read("colours.css"), _read("picture.css")
    if not alone:
        return colours + _read("dark.css") + look
    for name, colour in re.findall(r"--([\w-]+): *([^;]+);", colours):
        look = look.replace(f"var(--{name})", colour)
    return look


def memory_used(best: Measurement | Estimate, result: Result) -> tuple[str, float] | None:
    """The peak in GiB, and its share of the budget, of a prediction at its upper end; None where it was not watched."""
    peak = best.high if isinstance(best, Estimate) else peak_bytes(best)
    if peak is None:
        return None
    return interval(best.low, peak) if isinstance(best, Estimate) else gib(
        peak
    ), peak / result.budget.device_bytes


def step_words(best: Measurement | Estimate) -> str:
    """The time of a step; empty where it is unknown."""
    step = best.step_seconds
    if isinstance(step, StepSeconds):
        return f"{step.median:.3g} s a step (95 %: {step.low:.3g} to {step.high:.3g})"
    return f"about {step:.3g} s a step" if step else ""


def training_time(seconds: float) -> str:
    """A time to train in the unit that fits it."""
    for least, size, name in (
        (172_800, 86_400, "days"),
        (5400, 3600, "hours"),
        (90, 60, "minutes"),
    ):
        if seconds >= least:
            return (
                f"{seconds / size:.3g} {name}"
                if seconds / size < 1000
                else f"{seconds / size:,.0f} {name}"
            )
    return f"{seconds:.3g} seconds"


def _exports(folder: Path) -> list[tuple[str, str]]:
    """(path, text) of the files for other tools that the run directory itself holds: what a link names is not of it."""
    texts: list[tuple[str, str]] = []
    if folder.is_symlink():
        return texts
    for path in sorted(folder.rglob("*"))[:_MOST_EXPORTS]:
        with contextlib.suppress(OSError):  # not ours to read: the page does without
            status = path.lstat()
            if (
                stat.S_ISREG(status.st_mode)
                and status.st_size <= _EXPORT_BYTES
                and not path.name.startswith(".")
            ):
                texts.append(
                    (
                        str(path.relative_to(folder)),
                        path.read_text(encoding="utf-8", errors="replace"),
                    )
                )
    return texts


def _trials(
    record: Record, directory: Path
) -> list[tuple[Measurement, Measurement, Predicted | None, str | None]]:
    """Every trial that is drawn with the latest measurement of its config, its prediction, and its log."""
    latest, rows = record.result.latest_by_config, []
    for place in drawn_trials(record.result):
        trial = record.result.trials[place]
        log = f"probes/{trial.number:04d}.log"
        predicted = record.predicted[place] if record.predicted else None
        rows.append(
            (trial, latest[trial.config], predicted, log if (directory / log).is_file() else None)
        )
    return rows


def _further_trials(record: Record, differing: Sequence[str]) -> str:
    """What the table shows of all other trials when it is asked to, as JSON; a config is the places of its words."""
    result = record.result
    latest = result.latest_by_config
    words: dict[str, int] = {}
    rows: list[list[Any]] = []
    for place in sorted({*range(len(result.trials))} - {*drawn_trials(result)}):
        trial = result.trials[place]
        config = describe(trial.config, differing) or describe(trial.config)
        step, peak = trial.step_seconds, peak_bytes(trial)
        verified = latest[trial.config]
        row = [
            trial.number + 1,
            [words.setdefault(word, len(words)) for word in config.split(", ")],
            tier(trial.config),
            trial.outcome.value,
            formatting.number(throughput(trial)[0]) if trial.fits else "",
            formatting.number(throughput(verified)[0]) if verified.verified else "",
            f"{step.median:.3g}" if step else "",
            gib(peak) if peak else "",
        ]
        if record.predicted:
            predicted = record.predicted[place]
            nbytes, seconds = predicted.allocated_bytes, predicted.step_seconds
            row += [gib(int(nbytes)) if nbytes else "", f"{seconds:.3g}" if seconds else ""]
        rows.append([*row, f"{trial.seconds:.1f}"])

    titles = {
        "tiers": formatting.TIER_TITLES,
        "outcomes": {outcome.value: name for outcome, name in formatting.OUTCOMES.items()},
    }
    text = json.dumps({"words": list(words), **titles, "rows": rows}, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def shared_knobs(result: Result) -> str:
    """The knobs that all trials have on, in a few words; empty where there is none, or only one trial."""
    if len(result.trials) < 2:
        return ""
    config = result.trials[0].config
    others = (*off_knobs(config), *knobs_that_differ(trial.config for trial in result.trials))
    on = [knob for knob in config if knob not in others]
    return describe(config, on) if on else ""


def _tiers(result: Result) -> list[tuple[str, str, str]]:
    """(name, mark, title) of each tier that is drawn."""
    drawn = {tier(trial.config) for trial in result.trials}
    drawn |= {name for name, points in result.frontier.items() if points}
    return [
        (name, mark, formatting.TIER_TITLES[name]) for name, mark in _MARKS.items() if name in drawn
    ]


def _inline(draw: Callable[..., Picture | None], record: Record, *given: object) -> Markup | None:
    picture = draw(record, *given)
    return Markup(picture.markup()) if picture else None  # ElementTree has escaped what is in it


def _both(draw: Callable[..., Picture | None], record: Record, *given: object) -> Markup | None:
    """A picture for a large page and for a small one, of which the style shows one."""
    wide, narrow = (_inline(draw, record, *given, width) for width in (720, 360))
    return (
        Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(wide, narrow)
        if wide
        else None
    )


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
        *(
            memory_used,
            step_words,
            training_time,
            shared_knobs,
            tier,
            config_rows,
            off_knobs,
            pluralize,
            summary,
        ),
        *(
            commands,
            knob_lines,
            other_budget_lines,
            explored_at,
            scatter,
            breakdown,
            timeline_picture,
            timeline_words,
        ),
        *(
            moments,
            traced_tiers,
            learning_picture,
            knob_picture,
            progress,
            devices_picture,
            error_picture,
            error_words,
        ),
    )
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {
        "text": formatting,
        "kinds": KIND_WORDS,
        "picture": _inline,
        "pictures": _both,
    }
    environment.globals |= {
        "tiers": _tiers,
        "trials": _trials,
        "further_trials": _further_trials,
        "exports": _exports,
    }
    return environment.from_string(_read("page.html"))
