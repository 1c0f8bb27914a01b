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
    generator = data["generator_bytes"]
    usable = gib(data["usable_bytes"])
    verdict = "Fits" if data["fits"] == "yes" else "Does not fit"
    needs = interval(data["device_bytes"]["low"], data["device_bytes"]["high"])

    figures = Table.grid(Column(), Column(justify="right"), padding=(0, 2))
    figures.add_row(Text("training, at its peak"), Text(needs))
    figures.add_row(Text("training, between steps"), Text(gib(data["at_rest_bytes"])))
    if generator["weights"]:
        figures.add_row(Text("vLLM's weights"), Text(gib(generator["weights"])))
        figures.add_row(Text("vLLM beside weights and cache"), Text(gib(generator["overhead"])))
    sequences = pluralize(generator["sequences"], "sequence")
    figures.add_row(Text(f"cache of {sequences} at once"), Text(gib(generator["cache"])))

    left = Table.grid(*(Column() for _ in range(3)), padding=(0, 2))
    if data["levels"]:
        left.add_row(Text("GiB left for"), Text("training"), Text("cache"))
    for level in data["levels"]:
        cells = (_signed(level["training"]), _signed(level["cache"]))
        left.add_row(Text(_LEVELS[level["level"]]), *map(Text, cells))

    lines = [f"  {name}: {_yaml(value)}" for name, value in data["recommended"].items()]
    notes = [f"Note: {note}" for note in data["notes"]]
    subject = f"{data['model']} by {data['workload']['task']}, on {data['hardware']['name']}"
    return Group(
        Text(subject),
        Text(f"{verdict}: {usable} GiB may be used of each device.", "bold"),
        Text(f"Config: {describe(data['config'])}.\n"),
        Text("GiB of each device"),
        figures,
        Text(),
        left,
        Text("TRL:"),
        *map(Text, lines),
        Text(),
        *map(Text, notes),
    )


def _signed(nbytes: int) -> str:
    return gib(nbytes) if nbytes > 0 else "nothing"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
