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
    """The device, the budget, the versions, and every value of every technique with how it stands here."""
    hardware = data["hardware"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    rows = {
        "device": f"{hardware['name']} ({hardware['device']})",
        "memory": f"{hardware['memory_bytes'] / GIB:.1f} GiB",
        "budget": f"{data['budget_gib']:.1f} GiB unless you give another",
        "host": f"{hardware['host_free_bytes'] / GIB:.1f} GiB free of {hardware['host_memory_bytes'] / GIB:.1f}, "
        + counted(hardware["cores"], "core"),
        "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
        "predictions": _calibration(data["calibration"]),
        "store": data["store"]["trouble"] or f"{_stored(data['store'])} in {data['store']['path']}",
    }
    for name, text in rows.items():
        facts.add_row(Text(name, style="bold"), Text(text))
    return Group(facts, Text(), _techniques(data["techniques"]))


def _techniques(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Two columns, a line for the name of each and its values below it: more would fold words on eighty columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=34)
    table.add_column()
    for each in rows:
        table.add_row(Text(each["name"], "bold"), Text("" if each["values"] else "derived from others"))
        for values, standing in _rows_of_values(each["values"]):
            table.add_row(Padding(Text(values), (0, 0, 0, 2)), Text(standing))
    return table


def _calibration(known: Mapping[str, Any]) -> str:
    """What measurements have shown predictions for this device to be off by."""
    if not known["count"]:
        return "not yet held against measurements of this device"
    times = f"steps took {known['seconds']:.2f} times as long as predicted" if known["seconds"] else ""
    memory = f"memory was {known['memory']:.3f} times what was predicted" if known["memory"] != 1.0 else ""
    told = " and ".join(filter(None, (memory, times))) or "as predicted"
    little = f", {known['discounted']} of them long ago or on a busy machine" if known["discounted"] else ""
    return f"{told} (median of {counted(known['count'], 'measurement')}{little})"


def cleared_text(data: Mapping[str, Any]) -> str:
    """What `--clear-store` removed."""
    cleared = data["cleared"]
    what = "what could not be read" if cleared["measurements"] is None else _stored(cleared)
    return f"removed {what} from {cleared['path']}"


def _stored(counts: Mapping[str, Any]) -> str:
    """Measurements that searches start from."""
    return f"{counted(counts['measurements'], 'measurement')} of {counted(counts['models'], 'model')}"


def _rows_of_values(values: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(values, how they stand here and what they are made with); values that stand alike share a row."""
    rows: dict[str, list[str]] = {}
    for each in values:
        made_with = each["package"] + (f" {each['version']}" if each["version"] else "")
        searched = "" if each["searched"] else ", but not searched on this device"
        rows.setdefault(each["reason"] or f"available{searched} ({made_with})", []).append(value(each["value"]))
    return [(", ".join(names), standing) for standing, names in rows.items()]


def models_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The presets: name, task, size, and where the weights are."""
    table = _table("model", "task", "size", "weights")
    table.columns[2].justify = "right"
    for row in rows:
        cells = (row["name"], row["task"], _count(row["parameters"]), row.get("hub") or "")
        table.add_row(*map(Text, cells))
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
