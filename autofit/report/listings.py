"""Tables of plain data, most of it what --json prints: predictions, what this machine offers, models, spaces, tools."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from autofit.core.errors import pluralize
from autofit.core.estimate import Resting
from autofit.core.hardware import GIB
from autofit.report.formatting import (
    FITS,
    POINT,
    bound_by,
    changes,
    describe,
    gib,
    hanging,
    interval,
    number,
    percent,
    resting_words,
    table,
    value,
)
from autofit.report.remedies import remedy_lines

_WIDEST_BAR = 40  # characters
_NOTICED = 0.005  # of memory or time: a smaller change counts as none
_SIZES = {
    "micro_batch_size": "micro-batch",
    "sequence_length": "sequence",
    "lora_rank": "LoRA rank",
}
_COSTS = {
    "tokens": ("dollars_per_billion_tokens", "$/1e9 tokens"),
    "samples": ("dollars_per_million_samples", "$/1e6 samples"),
}


@dataclass(frozen=True)
class _Bar:
    """A bar as long as its share of the room there is: plain signs, also where the output is no terminal."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST_BAR)
        yield Text("#" * max(1, round(self.share * width)) if self.share else "")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, _WIDEST_BAR)


def estimate_table(data: Mapping[str, Any]) -> RenderableType:
    """The verdict first, then what the memory consists of and where the time goes."""
    usable, budget, reserved = data["usable_bytes"], data["budget_bytes"], data["reserved_bytes"]
    margin = f" (a margin of {percent(1 - usable / budget)} is kept)" if usable < budget else ""
    verdict = f"{FITS[data['fits']].capitalize()}: {_interval(data)} GiB expected, {gib(usable)} may be used{margin}."
    parts = Table.grid(Column(), Column(justify="right"), Column(), padding=(0, 2))
    most = max(data["breakdown"].values())
    for name, nbytes in data["breakdown"].items():
        parts.add_row(
            Text(name), Text(gib(nbytes) if nbytes else "-"), _Bar(nbytes / most if most else 0.0)
        )
    tensors = f"{gib(data['allocated_bytes'])} GiB of tensors at the peak"
    tensors += "." if reserved is None else f", {gib(reserved)} reserved for them."
    subject = Text(f"{_subject(data)}, on {data['hardware']['name']} within {gib(budget)} GiB")
    config, notes = (
        Text(f"Config: {describe(data['config'])}.\n"),
        (f"Note: {note}" for note in data["notes"]),
    )
    between = [resting_words(Resting(**data["resting"]))] if data.get("resting") else []
    if data.get("host_bytes"):
        between.insert(0, f"{gib(data['host_bytes'])} GiB in the memory of the host.")
    lines = map(Text, (tensors, *between, "", _time(data), *notes))
    return Group(subject, Text(verdict, "bold"), config, parts, *lines)


def experts_line(data: Mapping[str, Any]) -> RenderableType:
    """What adapters on experts, too, would take: the first question about a mixture, before all others are answered."""
    verdict = f"it {FITS[data['fits']]}, {_interval(data)} GiB expected."
    return Text(
        f"With lora_targets {data['lora_targets']}, and so adapters on the experts too, {verdict}"
    )


def around_table(data: Mapping[str, Any], *, rows: int = 16) -> RenderableType:
    """What each single change of a knob would save or cost, and the largest sizes that still fit."""
    alternatives = list(_worth_a_row(data))
    first = Column("from here", overflow="fold")  # the only one that gives way where it is narrow
    figures = (
        Column(title, justify="right", no_wrap=True) for title in ("GiB", "memory", "time", "fits")
    )
    changed = table(first, *figures)
    for other in alternatives[:rows]:
        memory, time = _changes(other, data)
        cells = (
            gib(_middle(other)),
            _percent(memory),
            "-" if time is None else _percent(time),
            other["fits"],
        )
        changed.add_row(*map(Text, (f"{other['knob']} {value(other['value'])}", *cells)))
    lines = (
        [f"{len(alternatives) - rows} more: --json --alternatives."]
        if len(alternatives) > rows
        else []
    )
    largest = ", ".join(
        f"{_SIZES[name]} {size or 'none'}" for name, size in data["largest"].items()
    )
    lines += [f"Largest that fits, all else as it is: {largest}."] if largest else []
    helps = remedy_lines(data.get("remedies") or ())
    lines += (
        ["What would help, the cheapest first:", *(POINT + line for line in helps)] if helps else []
    )
    shown = (Text(), changed) if alternatives else (Text("Nothing is known of other configs."),)
    return Group(*shown, hanging(lines))


def cards_table(data: Mapping[str, Any]) -> RenderableType:
    """The cards, and whether the config fits each; of several numbers of several cards, only those that it fits."""
    unit = "tokens" if any(card["tokens_per_second"] for card in data["cards"]) else "samples"
    cost, dollars = _COSTS[unit]
    names, numbers = ({card[key] for card in data["cards"]} for key in ("name", "devices"))
    nodes = max((card["nodes"] for card in data["cards"]), default=1)
    several, priced = (
        max(numbers, default=1) * nodes > 1,
        any(card[cost] is not None for card in data["cards"]),
    )
    many, price = [">devices"] * several, [f">{dollars}"] * priced
    cards = _named("--gpu", *many, ">GiB", "fits", ">needs GiB", f">{unit}/s", *price)
    shown = [
        card for card in data["cards"] if card["fits"] != "no" or 1 in (len(names), len(numbers))
    ]
    for card in shown:
        many = [f"{nodes} x {card['devices']}" if nodes > 1 else str(card["devices"])] * several
        needs = _interval(card) if card["device_bytes"] else "-"
        rates = [
            "-" if card[key] is None else number(card[key]) for key in (f"{unit}_per_second", cost)
        ]
        cells = (
            card["name"],
            *many,
            f"{card['memory_bytes'] / GIB:.1f}",
            card["fits"],
            needs,
            *rates[: 1 + priced],
        )
        cards.add_row(*map(Text, cells))
    lines = [_subject(data), f"Config: {describe(data['config'])}."]
    for fewer, more in pairwise(data["configs"]):
        if changed := changes(more["config"], fewer["config"]):
            lines.append(f"From {more['devices']} devices on: {', '.join(changed)}.")
    left_out = len(data["cards"]) - len(shown)
    notes = [f"{left_out} more do not fit; --json lists them."] if left_out else []
    notes += [
        f"- {reason}"
        for reason in dict.fromkeys(card["reason"] for card in data["cards"] if card["reason"])
    ]
    notes += [f"Note: {note}" for note in data["notes"]]
    return Group(*map(Text, lines), cards, *map(Text, notes))


def _subject(data: Mapping[str, Any]) -> str:
    workload = data["workload"]
    length = f"{workload['sequence_length']} tokens, " if workload["sequence_length"] else ""
    return f"{data['model']}: {length}effective batch {workload['effective_batch_size']}"


def _interval(data: Mapping[str, Any]) -> str:
    return interval(data["device_bytes"]["low"], data["device_bytes"]["high"])


def _time(data: Mapping[str, Any]) -> str:
    seconds = data["step_seconds"]
    if seconds is None:
        return "How long a step takes is not known."
    figures = {unit: data[f"{unit}_per_second"] for unit in ("tokens", "samples")}
    rates = ", ".join(f"{number(figure)} {unit}/s" for unit, figure in figures.items() if figure)
    step = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
    what = bound_by(data["bottleneck"], data["config"])
    bound = f"{what}, {percent(data['utilisation'])} of the peak rate put to use"
    return f"A step takes {step}: {rates}; {bound}."


def _worth_a_row(data: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The changes that make a difference; of knobs with many values only the next smaller and the next larger one."""
    for other in data["alternatives"]:
        memory, time = _changes(other, data)
        if abs(memory) < _NOTICED and abs(time or 0.0) < _NOTICED:
            continue
        knob = other["knob"]
        if knob in _SIZES:
            current = data["config"][knob] or 0
            sizes = sorted(
                change["value"] or 0 for change in data["alternatives"] if change["knob"] == knob
            )
            smaller, larger = (
                [size for size in sizes if size < current],
                [size for size in sizes if size > current],
            )
            if other["value"] not in (*smaller[-1:], *larger[:1]):
                continue
        yield other


def _changes(other: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[float, float | None]:
    """By which shares memory and time change; None where the time is unknown."""
    time = other["step_seconds"] / data["step_seconds"] - 1 if other["step_seconds"] else None
    return _middle(other) / _middle(data) - 1, time


def _middle(data: Mapping[str, Any]) -> int:
    return (int(data["device_bytes"]["low"]) + int(data["device_bytes"]["high"])) // 2


def _percent(change: float) -> str:
    return f"{change:+.0%}" if abs(change) >= _NOTICED else "0%"


def doctor_table(data: Mapping[str, Any]) -> RenderableType:
    """The device, the budget, the versions, and whether every value of every technique is available here."""
    hardware, store = data["hardware"], data["store"]
    free, memory = (
        f"{hardware[key] / GIB:.1f}" for key in ("host_free_bytes", "host_memory_bytes")
    )
    rows = {
        "device": f"{hardware['name']} ({hardware['device']})",
        "memory": f"{hardware['memory_bytes'] / GIB:.1f} GiB",
        "budget": f"{data['budget_gib']:.1f} GiB unless you give another",
        "host": f"{free} GiB free of {memory}, {pluralize(hardware['cores'], 'core')}",
        "versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
        "predictions": _calibration(data["calibration"]),
        "store": store["trouble"] or f"{_measurements(store)} in {store['path']}",
    }
    for package, error in data["broken"].items():
        rows[f"broken: {package}"] = error
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, text in rows.items():
        facts.add_row(Text(name, style="bold"), Text(text))
    # Two columns, a line for the name of each and its values below it: more would fold words on eighty columns.
    knobs = Table.grid(Column(max_width=34), Column(), padding=(0, 2, 0, 0))
    for technique in data["techniques"]:
        knobs.add_row(
            Text(technique["name"], "bold"),
            Text("" if technique["values"] else "derived from others"),
        )
        for status, values in _by_status(technique["values"]).items():
            knobs.add_row(Padding(Text(", ".join(values)), (0, 0, 0, 2)), Text(status))
    return Group(facts, Text(), knobs)


def _calibration(known: Mapping[str, Any]) -> str:
    """By how much measurements on this device differed from predictions."""
    if not known["count"]:
        return "not yet held against measurements of this device"
    times = (
        f"steps took {known['seconds']:.2f} times as long as predicted" if known["seconds"] else ""
    )
    memory = (
        f"memory was {known['memory']:.3f} times what was predicted"
        if known["memory"] != 1.0
        else ""
    )
    ratios = " and ".join(filter(None, (memory, times))) or "as predicted"
    old = (
        f", {known['discounted']} of them long ago or on a busy machine"
        if known["discounted"]
        else ""
    )
    return f"{ratios} (median of {pluralize(known['count'], 'measurement')}{old})"


def cleared_text(data: Mapping[str, Any]) -> str:
    """What `--clear-store` removed."""
    cleared = data["cleared"]
    what = "what could not be read" if cleared["measurements"] is None else _measurements(cleared)
    return f"removed {what} from {cleared['path']}"


def _measurements(counts: Mapping[str, Any]) -> str:
    return f"{pluralize(counts['measurements'], 'measurement')} of {pluralize(counts['models'], 'model')}"


def _by_status(values: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The values by whether they are available here and what implements them."""
    rows: dict[str, list[str]] = {}
    for each in values:
        package = each["package"] + (f" {each['version']}" if each["version"] else "")
        searched = "" if each["searched"] else ", but not searched on this device"
        rows.setdefault(each["reason"] or f"available{searched} ({package})", []).append(
            value(each["value"])
        )
    return rows


def models_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The presets: name, task, size, and where the weights are."""
    models = _named("model", "task", ">size", "weights")
    for row in rows:
        count = row["parameters"]
        sizes = (
            f"{count / unit:.3g}{suffix}"
            for unit, suffix in ((10**9, "B"), (10**6, "M"))
            if count >= unit
        )
        models.add_row(
            *map(Text, (row["name"], row["task"], next(sizes, f"{count:,}"), row.get("hub") or ""))
        )
    return models


def spaces_table(rows: Sequence[Mapping[str, Any]], counted_for: str) -> RenderableType:
    """The search spaces: name, what each allows, and how many configs it holds for the named case."""
    spaces = _named("space", ">configs", "what it allows")
    for row in rows:
        number = (
            f"{row['configs']:,}" if row["counted"] == "exactly" else f"at most {row['configs']:,}"
        )
        spaces.add_row(Text(row["name"]), Text(number), Text(" ".join(row["description"].split())))
    return Group(spaces, Text(f"Counted without what is refused, {counted_for}."))


def tools_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The tools that configs are exported to: name, versions, what they train, how an export is used."""
    tools = _named("tool", "what it trains, with whose keys, and how")
    for row in rows:
        tasks = ", ".join(row["tasks"]) or "anything"
        tools.add_row(
            Text(row["name"]),
            Text(f"{tasks}; {row['name']} {', '.join(row['versions'])}\n{row['run']}"),
        )
    return tools


def _named(name: str, *titles: str) -> Table:
    """A table whose first column is the name that the others are about; those with a `>` stand at the right."""
    others = (Column(each.removeprefix(">"), overflow="fold") for each in titles)
    shown = table(Column(name, no_wrap=True, overflow="ellipsis"), *others)
    for column, title in zip(shown.columns[1:], titles, strict=True):
        column.justify = "right" if title.startswith(">") else "left"
    return shown
