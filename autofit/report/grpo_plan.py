"""The plan of a training by GRPO on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from autofit.core.errors import pluralize
from autofit.report.formatting import describe, gib, interval

_LEVELS = (
    "vLLM awake beside the training",
    "asleep, weights in host memory",
    "asleep, weights dropped",
)


def grpo_plan_table(data: Mapping[str, Any]) -> RenderableType:
    """Whether it fits, what training and generation need, and the keys that TRL is given."""
    task = data["workload"]["task"]
    subject = f"{data['model']} by {task}, on {data['hardware']['name']}"
    fits = "Does not fit"
    if data["fits"] == "yes":
        fits = "Fits"
    verdict = f"{fits}: {gib(data['usable_bytes'])} GiB may be used of each device."

    left = Table.grid(Column(), Column(), Column(), padding=(0, 2))
    if data["levels"]:
        left.add_row(Text("GiB left for"), Text("training"), Text("cache"))
    for level in data["levels"]:
        name = _LEVELS[level["level"]]
        cells = (name, _left(level["training"]), _left(level["cache"]))
        left.add_row(*map(Text, cells))

    lines = []
    for name, value in data["recommended"].items():
        if isinstance(value, bool):
            value = str(value).lower()
        lines.append(f"  {name}: {value}")

    lines.append("")
    lines += [f"Note: {note}" for note in data["notes"]]

    return Group(
        Text(subject),
        Text(verdict, "bold"),
        Text(f"Config: {describe(data['config'])}.\n"),
        Text("GiB of each device"),
        _needs(data),
        Text(),
        left,
        Text("TRL:"),
        *map(Text, lines),
    )


def _needs(data: Mapping[str, Any]) -> Table:
    """What training and generation need of each device."""
    training = data["device_bytes"]
    rows = {
        "training, at its peak": interval(training["low"], training["high"]),
        "training, between steps": gib(data["at_rest_bytes"]),
    }

    generator = data["generator_bytes"]
    if generator["weights"]:
        rows["vLLM's weights"] = gib(generator["weights"])
        rows["vLLM beside weights and cache"] = gib(generator["overhead"])

    sequences = pluralize(generator["sequences"], "sequence")
    rows[f"cache of {sequences} at once"] = gib(generator["cache"])

    needs = Table.grid(Column(), Column(justify="right"), padding=(0, 2))
    for name, size in rows.items():
        needs.add_row(Text(name), Text(size))

    return needs


def _left(nbytes: int) -> str:
    """What is left, in GiB."""
    if nbytes <= 0:
        return "nothing"
    return gib(nbytes)
