"""Tables of plain data: what this machine offers, the models known by name, the search spaces, tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autofit.core.errors import counted
from autofit.core.hardware import GIB
from autofit.report.formatting import value


def doctor_table(data: Mapping[str, Any]) -> RenderableType:
    """The device, the budget, the versions, and whether every value of every technique is available here."""
    hardware, store = data["hardware"], data["store"]
    free, memory = (f"{hardware[key] / GIB:.1f}" for key in ("host_free_bytes", "host_memory_bytes"))
    rows = {
        "device": f"{hardware['name']} ({hardware['device']})",
        "memory": f"{hardware['memory_bytes'] / GIB:.1f} GiB",
        "budget": f"{data['budget_gib']:.1f} GiB unless you give another",
        "host": f"{free} GiB free of {memory}, {counted(hardware['cores'], 'core')}",
        "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
        "predictions": _calibration(data["calibration"]),
        "store": store["trouble"] or f"{_measurements(store)} in {store['path']}",
    }
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    for name, text in rows.items():
        facts.add_row(Text(name, style="bold"), Text(text))
    # Two columns, a line for the name of each and its values below it: more would fold words on eighty columns.
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=34)
    table.add_column()
    for technique in data["techniques"]:
        table.add_row(Text(technique["name"], "bold"), Text("" if technique["values"] else "derived from others"))
        for status, values in _by_status(technique["values"]).items():
            table.add_row(Padding(Text(", ".join(values)), (0, 0, 0, 2)), Text(status))
    return Group(facts, Text(), table)


def _calibration(known: Mapping[str, Any]) -> str:
    """By how much measurements on this device differed from predictions."""
    if not known["count"]:
        return "not yet held against measurements of this device"
    times = f"steps took {known['seconds']:.2f} times as long as predicted" if known["seconds"] else ""
    memory = f"memory was {known['memory']:.3f} times what was predicted" if known["memory"] != 1.0 else ""
    ratios = " and ".join(filter(None, (memory, times))) or "as predicted"
    old = f", {known['discounted']} of them long ago or on a busy machine" if known["discounted"] else ""
    return f"{ratios} (median of {counted(known['count'], 'measurement')}{old})"


def cleared_text(data: Mapping[str, Any]) -> str:
    """What `--clear-store` removed."""
    cleared = data["cleared"]
    what = "what could not be read" if cleared["measurements"] is None else _measurements(cleared)
    return f"removed {what} from {cleared['path']}"


def _measurements(counts: Mapping[str, Any]) -> str:
    return f"{counted(counts['measurements'], 'measurement')} of {counted(counts['models'], 'model')}"


def _by_status(values: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The values by whether they are available here and what implements them."""
    rows: dict[str, list[str]] = {}
    for each in values:
        package = each["package"] + (f" {each['version']}" if each["version"] else "")
        searched = "" if each["searched"] else ", but not searched on this device"
        rows.setdefault(each["reason"] or f"available{searched} ({package})", []).append(value(each["value"]))
    return rows


def models_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The presets: name, task, size, and where the weights are."""
    table = _table("model", "task", "size", "weights")
    table.columns[2].justify = "right"
    for row in rows:
        count = row["parameters"]
        sizes = (f"{count / unit:.3g}{suffix}" for unit, suffix in ((10**9, "B"), (10**6, "M")) if count >= unit)
        table.add_row(*map(Text, (row["name"], row["task"], next(sizes, f"{count:,}"), row.get("hub") or "")))
    return table


def spaces_table(rows: Sequence[Mapping[str, Any]], counted_for: str) -> RenderableType:
    """The search spaces: name, what each allows, and how many configs it holds for the named case."""
    table = _table("space", "configs", "what it allows")
    table.columns[1].justify = "right"
    for row in rows:
        number = f"{row['configs']:,}" if row["counted"] == "exactly" else f"at most {row['configs']:,}"
        table.add_row(Text(row["name"]), Text(number), Text(" ".join(row["description"].split())))
    return Group(table, Text(f"Counted without what is refused, {counted_for}."))


def tools_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The tools that configs are exported to: name, versions, what they train, how an export is used."""
    table = _table("tool", "what it trains, with whose keys, and how")
    for row in rows:
        tasks = ", ".join(row["tasks"]) or "anything"
        table.add_row(Text(row["name"]), Text(f"{tasks}; {row['name']} {', '.join(row['versions'])}\n{row['run']}"))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    table.columns[0].no_wrap, table.columns[0].overflow = True, "ellipsis"  # the name that the others are about
    return table
