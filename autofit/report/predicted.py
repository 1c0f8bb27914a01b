"""The end of a search that could measure nothing: the best predicted config, in the same words everywhere."""

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
    """What is predicted, for a terminal: the answer, its memory, the tiers, and what was written."""
    hardware, budget = result.hardware, result.budget
    asked = {
        "model": result.model,
        "workload": result.workload,
        "hardware": {"name": hardware.name},
    }
    sizes = {"budget_bytes": budget.device_bytes, "usable_bytes": budget.cap_bytes(hardware.device)}
    table = estimate_table({**asked, **sizes, **best.to_dict()})
    answer = Text(one_line(f"Predicted, not measured: {answer_line(result, best)}"), "bold")
    sentences = hanging([*predicted_lines(result, best), *predicted_notes(result)])
    tiers = tiers_table(result)
    side_by_side = [Text(), tiers] if tiers else []
    lines = [answer, *side_by_side, Text(), table, Text(), sentences]
    directory, files = directory_of(result), written(result)
    if directory is not None and files is not None:
        lines += [
            Text(),
            files,
            *(Text(f"{title}: {command}") for title, command in commands(result, directory)[:1]),
        ]
    return Group(*lines)


def answer_line(result: Result, best: Estimate) -> str:
    """The best predicted config's speed and memory."""
    speed = f"about {rate(best)} in " if rate(best) else ""
    of = f"{interval(best.low, best.high)} of {gib(result.budget.device_bytes)} GiB"
    return f"{speed}{of}, the best predicted config for {result.model} on {result.hardware.title}."


def predicted_lines(result: Result, best: Estimate) -> list[str]:
    """Whether it fits and how much is left, and the best of the other tiers."""
    usable = result.budget.cap_bytes(result.hardware.device)
    if best.high <= usable:
        left = f"{gib(usable - best.high)} GiB are left at the upper end of {gib(usable)} that may be used"
    else:
        left = f"its upper end is {gib(best.high - usable)} GiB above the {gib(usable)} that may be used"
    others = []
    for name, other in result.predicted_tiers.items():
        if other and other.config != best.config:
            sure = "" if other.verdict == "yes" else ", which may or may not fit"
            figures = f"{rate(other)} in {interval(other.low, other.high)} GiB{sure}"
            others.append(f"{POINT}{TIER_TITLES[name]}: {figures}: {describe(other.config)}")
    nothing = (
        name
        for name, other in result.predicted_tiers.items()
        if other is None and result.frontier.get(name)
    )
    none = [TIER_TITLES[name] for name in nothing]
    lines = [f"It {_VERDICTS[best.verdict or 'maybe']}: {left}."]
    lines += ["The best predicted of the other tiers:", *others] if others else []
    return [
        *lines,
        *(
            [f"Of all that was predicted, nothing fits that trains {' or '.join(none)}."]
            if none
            else []
        ),
    ]


def predicted_notes(result: Result) -> list[str]:
    """What was predicted, why it was not measured, and what was assumed."""
    return [prediction_counts(result), *result.notes]


def prediction_counts(result: Result) -> str:
    """How many configs there are and are refused, and how many of those predicted do not fit."""
    too_large, refused = result.skipped.get("predicted", 0), result.skipped.get("refused", 0)
    beforehand = f"{refused:,} are refused beforehand, and " if refused else ""
    total, budget = pluralize(result.space_size, "config"), f"{gib(result.budget.device_bytes)} GiB"
    return (
        f"Of {total} {beforehand}{too_large:,} of those predicted do not fit {budget}; "
        "none was measured."
    )


def explain_predicted(result: Result, best: Estimate) -> str:
    """The same as plain sentences."""
    head = f"Nothing was measured. Predicted for {result.model} on {where(result.hardware, result.budget)}:"
    lines = [
        f"{head} {describe(best.config)}.",
        answer_line(result, best),
        *predicted_lines(result, best),
        *best.notes,
    ]
    return "\n".join(filter(None, [*lines, on_other_devices(result)]))
