"""The end of a search that could measure nothing: what is predicted to be the best, in the same words everywhere."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autofit.core.errors import counted
from autofit.core.estimate import Estimate
from autofit.core.result import Result
from autofit.report.estimate_table import estimate_table
from autofit.report.formatting import describe, gib, interval, printable, rates, where
from autofit.report.hanging import POINT, hanging
from autofit.report.next_steps import commands, directory_of, written

_TIERS = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
_VERDICTS = {"yes": "fits by all that is predicted", "maybe": "may or may not fit", "no": "does not fit"}


def foretold_view(result: Result, found: Estimate) -> RenderableType:
    """What is predicted, for a terminal: the answer, its memory, the tiers, and what was written."""
    lines: list[RenderableType] = [
        Text(printable(f"Predicted, not measured: {answer_line(result, found)}"), "bold"),
        Text(),
        estimate_table(_estimate_of(result, found)),
        Text(),
        hanging([*foretold_lines(result, found), *foretold_of(result)]),
    ]
    directory, files = directory_of(result), written(result)
    if directory is not None and files is not None:
        lines += [Text(), files, *(Text(f"{title}: {line}") for title, line in commands(result, directory)[:1])]
    return Group(*lines)


def answer_line(result: Result, found: Estimate) -> str:
    """What is predicted to be the best, how fast, and in how much memory."""
    speed = f"about {rates(found)} in " if rates(found) else ""
    of = f"{interval(found)} of {gib(result.budget.device_bytes)} GiB"
    return f"{speed}{of}, the best predicted config for {result.model} on {result.hardware.name}."


def foretold_lines(result: Result, found: Estimate) -> list[str]:
    """Whether it fits and how much is left, and the best of the other tiers."""
    others = [
        _tier(name, each) for name, each in result.predicted_tiers.items() if each and each.config != found.config
    ]
    none = [name for name, each in result.predicted_tiers.items() if each is None and result.frontier.get(name)]
    return [
        f"It {_VERDICTS[found.verdict or 'maybe']}: {_left(result, found)}.",
        *(["The best predicted of the other tiers:", *(POINT + each for each in others)] if others else []),
        *([f"Nothing is predicted to fit that trains {' or '.join(_TIERS[name] for name in none)}."] if none else []),
    ]


def foretold_of(result: Result) -> list[str]:
    """What was predicted, why it was not measured, and what was assumed."""
    return [predicted_of(result), *result.notes]


def predicted_of(result: Result) -> str:
    """How many configs there are, and how many of them cannot be or are predicted not to fit."""
    too_large, refused = result.skipped.get("predicted", 0), result.skipped.get("refused", 0)
    beforehand = f" and {refused:,} refused beforehand" if refused else ""
    return (
        f"Of {counted(result.space_size, 'config')} {too_large:,} are predicted not to fit "
        f"{gib(result.budget.device_bytes)} GiB{beforehand}; none was measured."
    )


def explained(result: Result, found: Estimate) -> str:
    """The same as plain sentences."""
    head = f"Nothing was measured. Predicted for {result.model} on {where(result.hardware, result.budget)}:"
    lines = [
        f"{head} {describe(found.config)}.",
        answer_line(result, found),
        *foretold_lines(result, found),
        *found.notes,
    ]
    return "\n".join(lines)


def _left(result: Result, found: Estimate) -> str:
    usable = result.budget.cap_bytes(result.hardware.device)
    if found.high <= usable:
        return f"{gib(usable - found.high)} GiB are left at the upper end of {gib(usable)} that may be used"
    return f"its upper end is {gib(found.high - usable)} GiB above the {gib(usable)} that may be used"


def _tier(name: str, found: Estimate) -> str:
    sure = "" if found.verdict == "yes" else ", which may or may not fit"
    return f"{_TIERS[name]}: {rates(found)} in {interval(found)} GiB{sure}: {describe(found.config)}"


def _estimate_of(result: Result, found: Estimate) -> dict[str, Any]:
    """What `autofit estimate` would tell of it."""
    return {
        "model": result.model,
        "workload": result.workload,
        "hardware": {"device": result.hardware.device, "name": result.hardware.name},
        "budget_bytes": result.budget.device_bytes,
        "usable_bytes": result.budget.cap_bytes(result.hardware.device),
        **found.to_dict(),
    }
