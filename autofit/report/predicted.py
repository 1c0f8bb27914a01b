"""The end of a search that could measure nothing: the best predicted config, in the same words
everywhere."""

from rich.console import Group, RenderableType
from rich.text import Text

from autofit.core.errors import pluralize
from autofit.core.estimate import Estimate
from autofit.core.quoting import one_line
from autofit.core.result import Result
from autofit.report.formatting import (
    POINT,
    TIER_TITLES,
    describe,
    gib,
    hanging,
    interval,
    rate,
    where,
)
from autofit.report.listings import estimate_table
from autofit.report.next_steps import commands, directory_of, written
from autofit.report.other_budgets import on_other_devices
from autofit.report.tiers import tiers_table

_VERDICTS = {
    "yes": "fits by all that is predicted",
    "maybe": "may or may not fit",
    "no": "does not fit",
}


def predicted_view(result: Result, best: Estimate) -> RenderableType:
    """What is predicted, for a terminal: the answer, its memory, the tiers, and what was
    written."""
    answer = one_line(f"Predicted, not measured: {answer_line(result, best)}")
    parts: list[RenderableType] = [Text(answer, "bold")]
    tiers = tiers_table(result)
    if tiers:
        parts += [Text(), tiers]

    hardware = result.hardware
    budget = result.budget
    data = {
        "model": result.model,
        "workload": result.workload,
        "hardware": {"name": hardware.name},
        "budget_bytes": budget.device_bytes,
        "usable_bytes": budget.cap_bytes(hardware.device),
    }
    sentences = [*predicted_lines(result, best), *predicted_notes(result)]
    parts += [
        Text(),
        estimate_table(data | best.to_dict()),
        Text(),
        hanging(sentences),
    ]

    directory = directory_of(result)
    files = written(result)
    if directory is not None and files is not None:
        title, command = commands(result, directory)[0]
        parts += [Text(), files, Text(f"{title}: {command}")]

    return Group(*parts)


def answer_line(result: Result, best: Estimate) -> str:
    """The best predicted config's speed and memory."""
    memory = interval(best.low, best.high)
    budget = gib(result.budget.device_bytes)
    figures = f"{memory} of {budget} GiB"

    speed = rate(best)
    if speed:
        figures = f"about {speed} in {figures}"

    place = f"{result.model} on {result.hardware.title}"
    return f"{figures}, the best predicted config for {place}."


def predicted_lines(result: Result, best: Estimate) -> list[str]:
    """Whether it fits and how much is left, and the best of the other tiers."""
    usable = result.budget.cap_bytes(result.hardware.device)
    room = usable - best.high
    allowed = f"{gib(usable)} that may be used"
    if room >= 0:
        left = f"{gib(room)} GiB are left at the upper end of {allowed}"
    else:
        left = f"its upper end is {gib(-room)} GiB above the {allowed}"

    verdict = _VERDICTS[best.verdict or "maybe"]
    lines = [f"It {verdict}: {left}."]

    others = []
    nothing = []
    for name, other in result.predicted_tiers.items():
        title = TIER_TITLES[name]
        if other is None:
            if result.frontier.get(name):
                nothing.append(title)
            continue

        if other.config != best.config:
            figures = f"{rate(other)} in {interval(other.low, other.high)} GiB"
            if other.verdict != "yes":
                figures += ", which may or may not fit"
            others.append(f"{POINT}{title}: {figures}: {describe(other.config)}")

    if others:
        lines += ["The best predicted of the other tiers:", *others]
    if nothing:
        none = " or ".join(nothing)
        lines.append(f"Of all that was predicted, nothing fits that trains {none}.")

    return lines


def predicted_notes(result: Result) -> list[str]:
    """What was predicted, why it was not measured, and what was assumed."""
    return [prediction_counts(result), *result.notes]


def prediction_counts(result: Result) -> str:
    """How many configs there are and are refused, and how many of those predicted do not fit."""
    counts = f"Of {pluralize(result.space_size, 'config')} "
    refused = result.skipped.get("refused", 0)
    if refused:
        counts += f"{refused:,} are refused beforehand, and "

    too_large = result.skipped.get("predicted", 0)
    budget = gib(result.budget.device_bytes)
    counts += f"{too_large:,} of those predicted do not fit {budget} GiB"
    return f"{counts}; none was measured."


def explain_predicted(result: Result, best: Estimate) -> str:
    """The same as plain sentences."""
    place = f"{result.model} on {where(result.hardware, result.budget)}"
    lines = [
        f"Nothing was measured. Predicted for {place}: {describe(best.config)}.",
        answer_line(result, best),
        *predicted_lines(result, best),
        *best.notes,
        on_other_devices(result),
    ]

    return "\n".join(filter(None, lines))
