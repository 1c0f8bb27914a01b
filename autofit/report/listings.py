"""Tables of plain data: what this machine offers, the models known by name, the search spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.core.hardware import GIB
from autofit.report.words import value


def doctor_table(data: Mapping[str, Any]) -> RenderableType:
    """The device, the budget, the versions, and every technique with what is unavailable and why."""
    hardware = data["hardware"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    rows = {
        "device": f"{hardware['name']} ({hardware['device']})",
        "memory": f"{hardware['memory_bytes'] / GIB:.1f} GiB",
        "budget": f"{data['budget_gib']:.1f} GiB unless you give another",
        "host": f"{hardware['host_free_bytes'] / GIB:.1f} GiB free of {hardware['host_memory_bytes'] / GIB:.1f}, "
        f"{hardware['cores']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
    }
    for name, text in rows.items():
        facts.add_row(Text(name, style="bold"), Text(text))
    techniques = _table("technique", "available", "not available")
    for each in data["techniques"]:
        choices = ", ".join(value(choice) for choice in each["choices"]) or "derived from others"
        reasons = "\n".join(f"{name}: {reason}" for name, reason in each["unavailable"].items())
        techniques.add_row(Text(each["name"]), Text(choices), Text(reasons))
    return Group(facts, techniques)


def models_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The presets: name, task, size, and where the weights are."""
    table = _table("model", "task", "parameters", "weights")
    table.columns[2].justify = "right"
    for row in rows:
        cells = (row["name"], row["task"], _count(row["parameters"]), row.get("hub") or "")
        table.add_row(*map(Text, cells))
    return table


def spaces_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The search spaces: name and what each allows."""
    table = _table("space", "what it allows")
    for row in rows:
        table.add_row(Text(row["name"]), Text(" ".join(row["description"].split())))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    first, *others = titles
    table.add_column(first, no_wrap=True, overflow="ellipsis")  # a name: what the other columns are about
    for title in others:
        table.add_column(title, overflow="fold")
    return table


def _count(parameters: int) -> str:
    for size, suffix in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.3g}{suffix}"
    return f"{parameters:,}"
