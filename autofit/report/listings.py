"""Tables of plain data, most of it what --json prints: predictions, what this machine offers,
models, spaces, tools."""

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
    bound_by,
    changes,
    describe,
    gib,
    hanging,
    interval,
    number,
    percent,
    points,
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
    """A bar as long as its share of the room there is: plain signs, also where the output is no
    terminal."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        length = 0
        if self.share:
            width = min(options.max_width, _WIDEST_BAR)
            length = max(1, round(self.share * width))

        yield Text("#" * length)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, _WIDEST_BAR)


def estimate_table(data: Mapping[str, Any]) -> RenderableType:
    """The verdict first, then what the memory consists of and where the time goes."""
    usable = data["usable_bytes"]
    budget = data["budget_bytes"]
    device = data["hardware"]["name"]
    place = f"{device} within {gib(budget)} GiB"

    fits = FITS[data["fits"]].capitalize()
    verdict = f"{fits}: {_interval(data)} GiB expected, {gib(usable)} may be used"
    if usable < budget:
        margin = percent(1 - usable / budget)
        verdict += f" (a margin of {margin} is kept)"

    allocated = data["allocated_bytes"]
    reserved = data["reserved_bytes"]
    tensors = f"{gib(allocated)} GiB of tensors at the peak"
    if reserved is not None:
        tensors += f", {gib(reserved)} reserved for them"
    lines = [f"{tensors}."]

    on_host = data.get("host_bytes")
    if on_host:
        lines.append(f"{gib(on_host)} GiB in the memory of the host.")

    resting = data.get("resting")
    if resting:
        lines.append(resting_words(Resting(**resting)))

    lines += ["", _time(data)]
    lines += _notes(data)

    return Group(
        Text(f"{_subject(data)}, on {place}"),
        Text(f"{verdict}.", "bold"),
        Text(f"Config: {describe(data['config'])}.\n"),
        _parts(data["breakdown"]),
        *map(Text, lines),
    )


def _notes(data: Mapping[str, Any]) -> list[str]:
    """The notes of an answer, a line each."""
    return [f"Note: {note}" for note in data["notes"]]


def _parts(breakdown: Mapping[str, int]) -> Table:
    """What the memory consists of, each part with a bar as long as its share of the largest."""
    parts = Table.grid(Column(), Column(justify="right"), Column(), padding=(0, 2))
    most = max(breakdown.values())
    for name, nbytes in breakdown.items():
        size = "-"
        share = 0.0
        if nbytes:
            size = gib(nbytes)
            share = nbytes / most

        parts.add_row(Text(name), Text(size), _Bar(share))

    return parts


def experts_line(data: Mapping[str, Any]) -> RenderableType:
    """What adapters on experts, too, would take: the first question about a mixture, before all
    others are answered."""
    verdict = f"it {FITS[data['fits']]}, {_interval(data)} GiB expected."
    return Text(
        f"With lora_targets {data['lora_targets']}, and so adapters on the experts too, {verdict}"
    )


def around_table(data: Mapping[str, Any], *, rows: int = 16) -> RenderableType:
    """What each single change of a knob would save or cost, and the largest sizes that still
    fit."""
    layouts = [
        {**other, "change": ", ".join(f"{knob} {value}" for knob, value in other["knobs"].items())}
        for other in data.get("layouts") or ()
    ]
    alternatives = [
        {**other, "change": f"{other['knob']} {value(other['value'])}"}
        for other in _worth_a_row(data)
    ]
    # the only column that gives way where it is narrow
    columns = [Column("from here", overflow="fold")]
    figures = ("GiB", "memory", "time", "fits")
    columns += [Column(title, justify="right", no_wrap=True) for title in figures]
    changed = table(*columns)
    for other in (*layouts, *alternatives[:rows]):
        memory, time = _changes(other, data)
        cells = [
            other["change"],
            gib(_middle(other)),
            _percent(memory),
            _percent(time),
            other["fits"],
        ]
        changed.add_row(*map(Text, cells))

    shown: list[RenderableType] = [Text("Nothing is known of other configs.")]
    if layouts or alternatives:
        shown = [Text(), changed]

    lines = []
    if data.get("layouts_note"):
        lines.append(data["layouts_note"])
    if len(alternatives) > rows:
        lines.append(f"{len(alternatives) - rows} more: --json --alternatives.")

    sizes = []
    for name, size in data["largest"].items():
        sizes.append(f"{_SIZES[name]} {size or 'none'}")

    if sizes:
        lines.append(f"Largest that fits, all else as it is: {', '.join(sizes)}.")

    helps = remedy_lines(data.get("remedies") or ())
    lines += points("What would help, the cheapest first:", helps)
    return Group(*shown, hanging(lines))


def cards_table(data: Mapping[str, Any]) -> RenderableType:
    """The cards, and whether the config fits each.

    Of several numbers of several cards only those that it fits.
    """
    every = data["cards"]
    shown = every
    names = {card["name"] for card in every}
    numbers = {card["devices"] for card in every}
    if len(names) != 1 and len(numbers) != 1:
        shown = [card for card in every if card["fits"] != "no"]

    lines = [_subject(data), f"Config: {describe(data['config'])}."]
    for fewer, more in pairwise(data["configs"]):
        changed = changes(more["config"], fewer["config"])
        if changed:
            lines.append(f"From {more['devices']} devices on: {', '.join(changed)}.")

    notes = []
    left_out = len(every) - len(shown)
    if left_out:
        notes.append(f"{left_out} more do not fit; --json lists them.")

    reasons = dict.fromkeys(card["reason"] for card in every)
    notes += [f"- {reason}" for reason in reasons if reason]
    notes += _notes(data)
    return Group(
        *map(Text, lines),
        _cards(every, shown),
        *map(Text, notes),
    )


def _cards(every: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each card that is shown, with the columns that any card of all needs."""
    unit = "samples"
    if any(card["tokens_per_second"] for card in every):
        unit = "tokens"

    cost, dollars = _COSTS[unit]
    are_priced = any(card[cost] is not None for card in every)
    nodes = max((card["nodes"] for card in every), default=1)
    devices = max((card["devices"] for card in every), default=1)
    are_several = devices * nodes > 1

    titles = [">GiB", "fits", ">needs GiB", f">{unit}/s"]
    if are_several:
        titles.insert(0, ">devices")
    if are_priced:
        titles.append(f">{dollars}")

    cards = _named("--gpu", *titles)
    for card in shown:
        needs = "-"
        if card["device_bytes"]:
            needs = _interval(card)

        cells = [card["name"]]
        if are_several:
            count = str(card["devices"])
            if nodes > 1:
                count = f"{nodes} x {count}"
            cells.append(count)

        memory = f"{card['memory_bytes'] / GIB:.1f}"
        rate = _known(card[f"{unit}_per_second"])
        cells += [memory, card["fits"], needs, rate]
        if are_priced:
            cells.append(_known(card[cost]))
        cards.add_row(*map(Text, cells))

    return cards


def _known(figure: float | None) -> str:
    """A figure, or a dash where there is none."""
    if figure is None:
        return "-"
    return number(figure)


def _subject(data: Mapping[str, Any]) -> str:
    """The model and the sizes of its work."""
    workload = data["workload"]
    sizes = f"effective batch {workload['effective_batch_size']}"
    if workload["sequence_length"]:
        sizes = f"{workload['sequence_length']} tokens, {sizes}"

    return f"{data['model']}: {sizes}"


def _interval(data: Mapping[str, Any]) -> str:
    return interval(data["device_bytes"]["low"], data["device_bytes"]["high"])


def _time(data: Mapping[str, Any]) -> str:
    """How long a step takes, what comes of it, and what bounds it."""
    seconds = data["step_seconds"]
    if seconds is None:
        return "How long a step takes is not known."

    step = f"{seconds * 1000:.3g} ms"
    if seconds >= 1:
        step = f"{seconds:.3g} s"

    rates = []
    for unit in ("tokens", "samples"):
        figure = data[f"{unit}_per_second"]
        if figure:
            rates.append(f"{number(figure)} {unit}/s")

    speed = ", ".join(rates)
    bound = bound_by(data["bottleneck"], data["config"])
    used = percent(data["utilisation"])
    return f"A step takes {step}: {speed}; {bound}, {used} of the peak rate put to use."


def _worth_a_row(data: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The changes that make a difference.

    Of knobs with many values only the next smaller and the next larger one.
    """
    for other in data["alternatives"]:
        memory, time = _changes(other, data)
        if abs(memory) < _NOTICED and abs(time or 0.0) < _NOTICED:
            continue

        knob = other["knob"]
        if knob not in _SIZES or other["value"] in _next_sizes(knob, data):
            yield other


def _next_sizes(knob: str, data: Mapping[str, Any]) -> list[int]:
    """The next smaller and the next larger value of a knob, as far as there are any."""
    current = data["config"][knob] or 0
    smaller = []
    larger = []
    for other in data["alternatives"]:
        if other["knob"] != knob:
            continue
        size = other["value"] or 0
        if size < current:
            smaller.append(size)
        elif size > current:
            larger.append(size)

    return [*sorted(smaller)[-1:], *sorted(larger)[:1]]


def _changes(other: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[float, float | None]:
    """By which shares memory and time change; None where the time is unknown."""
    memory = _middle(other) / _middle(data) - 1

    before = data["step_seconds"]
    after = other["step_seconds"]
    time = None
    if before and after:
        time = after / before - 1

    return memory, time


def _middle(data: Mapping[str, Any]) -> int:
    """The bytes in the middle of what is predicted."""
    ends = data["device_bytes"]
    return (int(ends["low"]) + int(ends["high"])) // 2


def _percent(change: float | None) -> str:
    """A change in percent, with its sign; a dash where it is unknown."""
    if change is None:
        return "-"
    if abs(change) < _NOTICED:
        return "0%"

    return f"{change:+.0%}"


def doctor_table(data: Mapping[str, Any]) -> RenderableType:
    """The device, the budget, the versions, and whether every value of every technique is available
    here."""
    hardware = data["hardware"]
    name = hardware["name"]
    kind = hardware["device"]
    memory = hardware["memory_bytes"] / GIB
    budget = data["budget_gib"]

    free = hardware["host_free_bytes"] / GIB
    host = hardware["host_memory_bytes"] / GIB
    cores = pluralize(hardware["cores"], "core")

    versions = []
    for package, version in data["versions"].items():
        versions.append(f"{package} {version}")

    store = data["store"]
    stored = store["trouble"]
    if not stored:
        stored = f"{_measurements(store)} in {store['path']}"

    rows = {
        "device": f"{name} ({kind})",
        "memory": f"{memory:.1f} GiB",
        "budget": f"{budget:.1f} GiB unless you give another",
        "host": f"{free:.1f} GiB free of {host:.1f}, {cores}",
        "versions": ", ".join(versions),
        "predictions": _calibration(data["calibration"]),
        "store": stored,
    }
    for package, error in data["broken"].items():
        rows[f"broken: {package}"] = error

    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for title, text in rows.items():
        facts.add_row(Text(title, style="bold"), Text(text))
    return Group(facts, Text(), _knobs(data["techniques"]))


def _knobs(techniques: Sequence[Mapping[str, Any]]) -> Table:
    """A line for the name of each knob and its values below it, beside how they stand."""
    # Two columns alone: more would fold words on eighty columns.
    knobs = Table.grid(Column(max_width=34), Column(), padding=(0, 2, 0, 0))
    for technique in techniques:
        values = technique["values"]
        derived = ""
        if not values:
            derived = "derived from others"
        knobs.add_row(Text(technique["name"], "bold"), Text(derived))

        for status, alike in _by_status(values).items():
            listed = Text(", ".join(alike))
            indented = Padding(listed, (0, 0, 0, 2))
            knobs.add_row(indented, Text(status))

    return knobs


def _calibration(known: Mapping[str, Any]) -> str:
    """By how much measurements on this device differed from predictions."""
    if not known["count"]:
        return "not yet held against measurements of this device"

    ratios = []
    if known["memory"] != 1.0:
        ratios.append(f"memory was {known['memory']:.3f} times what was predicted")
    if known["seconds"]:
        ratios.append(f"steps took {known['seconds']:.2f} times as long as predicted")
    found = " and ".join(ratios) or "as predicted"

    counted = f"median of {pluralize(known['count'], 'measurement')}"
    discounted = known["discounted"]
    if discounted:
        counted += f", {discounted} of them long ago or on a busy machine"

    return f"{found} ({counted})"


def cleared_text(data: Mapping[str, Any]) -> str:
    """What `--clear-store` removed."""
    cleared = data["cleared"]
    what = "what could not be read"
    if cleared["measurements"] is not None:
        what = _measurements(cleared)

    return f"removed {what} from {cleared['path']}"


def _measurements(counts: Mapping[str, Any]) -> str:
    measurements = pluralize(counts["measurements"], "measurement")
    return f"{measurements} of {pluralize(counts['models'], 'model')}"


def _by_status(values: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The values by whether they are available here and what implements them."""
    rows: dict[str, list[str]] = {}
    for entry in values:
        package = entry["package"]
        version = entry["version"]
        if version:
            package += f" {version}"

        status = "available"
        if not entry["searched"]:
            status = "available, but not searched on this device"
        status = f"{status} ({package})"

        reason = entry["reason"]  # why it is not
        same = rows.setdefault(reason or status, [])
        same.append(value(entry["value"]))

    return rows


def models_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The presets: name, task, size, and where the weights are."""
    models = _named("model", "task", ">size", "weights")
    for row in rows:
        size = _count(row["parameters"])
        weights = row.get("hub") or ""
        cells = (row["name"], row["task"], size, weights)
        models.add_row(*map(Text, cells))

    return models


def _count(parameters: int) -> str:
    """A number of parameters, in billions or millions where it has some."""
    if parameters >= 10**9:
        return f"{parameters / 10**9:.3g}B"
    if parameters >= 10**6:
        return f"{parameters / 10**6:.3g}M"

    return f"{parameters:,}"


def spaces_table(rows: Sequence[Mapping[str, Any]], counted_for: str) -> RenderableType:
    """The search spaces: name, what each allows, and how many configs it holds for the named
    case."""
    spaces = _named("space", ">configs", "what it allows")
    for row in rows:
        count = f"{row['configs']:,}"
        if row["counted"] != "exactly":
            count = f"at most {count}"

        allowed = " ".join(row["description"].split())
        cells = (row["name"], count, allowed)
        spaces.add_row(*map(Text, cells))

    note = f"Counted without what is refused, {counted_for}."
    return Group(spaces, Text(note))


def tools_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The tools that configs are exported to: name, versions, what they train, how an export is
    used."""
    tools = _named("tool", "what it trains, with whose keys, and how")
    for row in rows:
        name = row["name"]
        tasks = ", ".join(row["tasks"]) or "anything"
        versions = ", ".join(row["versions"])

        facts = f"{tasks}; {name} {versions}\n{row['run']}"
        tools.add_row(Text(name), Text(facts))

    return tools


def _named(name: str, *titles: str) -> Table:
    """A table whose first column is the name that the others are about.

    Columns whose title begins with `>` stand at the right.
    """
    columns = [Column(name, no_wrap=True, overflow="ellipsis")]
    for title in titles:
        column = Column(title.removeprefix(">"), overflow="fold")
        if title.startswith(">"):
            column.justify = "right"
        columns.append(column)

    return table(*columns)
