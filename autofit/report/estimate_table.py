"""A prediction as tables, made from the objects that --json prints, so that both say the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from autofit.core.hardware import GIB
from autofit.report.formatting import describe, gib, number, percent, value

_VERDICTS = {"yes": "Fits", "maybe": "May fit", "no": "Does not fit"}
_WIDEST_BAR = 40  # characters
_NOTICED = 0.005  # of memory or time: a change of less is none
_NEIGHBOURS = ("micro_batch_size", "lora_rank")  # knobs of many values, of which the nearest ones say enough
_FOLLOWS = {  # what a bottleneck means, in words
    "compute": "bound by arithmetic",
    "memory": "bound by the device's memory",
    "transfer": "bound by copies to and from the host",
}
_SIZES = {"micro_batch_size": "micro-batch", "sequence_length": "sequence", "lora_rank": "LoRA rank"}


class _Bar:
    """A row of signs as long as its share of the widest one, in whatever width there is."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("#" * max(1, round(self._share * min(options.max_width, _WIDEST_BAR))) if self._share else "")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, _WIDEST_BAR)


def estimate_table(data: Mapping[str, Any]) -> RenderableType:
    """The verdict first, then what the memory consists of and where the time goes."""
    lines = [
        Text(_title(data)),
        Text(_verdict(data), style="bold"),
        Text(f"Config: {describe(data['config'])}."),
        Text(),
    ]
    below = [Text(_in_all(data)), Text(), Text(_time(data)), *(Text(f"Note: {note}") for note in data["notes"])]
    return Group(*lines, _breakdown(data["breakdown"]), *below)


def around_table(data: Mapping[str, Any], *, rows: int = 16) -> RenderableType:
    """What each single change of a knob would save or cost, and the largest sizes that still fit."""
    shown = list(_worth_a_row(data))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("from here", overflow="fold")  # the only one that gives way where it is narrow
    for title in ("GiB", "memory", "time", "fits"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in shown[:rows]:
        table.add_row(*map(Text, _change(each, data)))
    more = [f"{len(shown) - rows} more: --json --alternatives."] if len(shown) > rows else []
    found: list[RenderableType] = [Text(), table] if shown else [Text("Nothing is known of other configs.")]
    return Group(*found, *map(Text, [*more, *_largest(data)]))


def cards_table(data: Mapping[str, Any]) -> RenderableType:
    """The cards of the catalogue, and whether the config fits each."""
    unit = "tokens" if any(card["tokens_per_second"] for card in data["cards"]) else "samples"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("--gpu", no_wrap=True)
    table.add_column("GiB", justify="right", overflow="fold")
    table.add_column("fits")
    table.add_column("needs GiB", justify="right", overflow="fold")  # a figure that is cut is another one
    table.add_column(f"{unit}/s", justify="right", overflow="fold")
    for card in data["cards"]:
        table.add_row(*map(Text, _card(card, unit)))
    reasons = dict.fromkeys(card["reason"] for card in data["cards"] if card["reason"])
    notes = [*(f"- {reason}" for reason in reasons), *(f"Note: {note}" for note in data["notes"])]
    return Group(Text(_subject(data)), Text(f"Config: {describe(data['config'])}."), table, *map(Text, notes))


def _title(data: Mapping[str, Any]) -> str:
    return f"{_subject(data)}, on {data['hardware']['name']} within {gib(data['budget_bytes'])} GiB"


def _subject(data: Mapping[str, Any]) -> str:
    workload = data["workload"]
    length = f"{workload['sequence_length']} tokens, " if workload["sequence_length"] else ""
    return f"{data['model']}: {length}effective batch {workload['effective_batch_size']}"


def _verdict(data: Mapping[str, Any]) -> str:
    usable, budget = data["usable_bytes"], data["budget_bytes"]
    margin = f" (a margin of {percent(1 - usable / budget)} is kept)" if usable < budget else ""
    return f"{_VERDICTS[data['fits']]}: {_interval(data)} GiB expected, {gib(usable)} may be used{margin}."


def _interval(data: Mapping[str, Any]) -> str:
    low, high = gib(data["device_bytes"]["low"]), gib(data["device_bytes"]["high"])
    return low if low == high else f"{low}-{high}"


def _breakdown(parts: Mapping[str, int]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    most = max(parts.values())
    for name, nbytes in parts.items():
        table.add_row(Text(name), Text(gib(nbytes) if nbytes else "-"), _Bar(nbytes / most if most else 0.0))
    return table


def _in_all(data: Mapping[str, Any]) -> str:
    allocated = f"{gib(data['allocated_bytes'])} GiB of tensors at the peak"
    reserved = data["reserved_bytes"]
    return f"{allocated}." if reserved is None else f"{allocated}, {gib(reserved)} reserved for them."


def _time(data: Mapping[str, Any]) -> str:
    seconds = data["step_seconds"]
    if seconds is None:
        return "How long a step takes is not known."
    rates = [
        f"{number(data[f'{unit}_per_second'])} {unit}/s" for unit in ("tokens", "samples") if data[f"{unit}_per_second"]
    ]
    bound = f"; {_FOLLOWS[data['bottleneck']]}, {percent(data['utilisation'])} of the peak rate put to use"
    return f"A step takes {_seconds(seconds)}: {', '.join(rates)}{bound}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _worth_a_row(data: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The changes that change something; of a size only the next smaller and the next larger."""
    for each in data["alternatives"]:
        if abs(_memory(each, data)) < _NOTICED and abs((_time_ratio(each, data) or 1.0) - 1) < _NOTICED:
            continue
        if each["knob"] not in _NEIGHBOURS or each["value"] in _next_ones(each["knob"], data):
            yield each


def _next_ones(knob: str, data: Mapping[str, Any]) -> Sequence[Any]:
    here = data["config"][knob] or 0
    others = sorted(each["value"] or 0 for each in data["alternatives"] if each["knob"] == knob)
    return [*[each for each in others if each < here][-1:], *[each for each in others if each > here][:1]]


def _change(each: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[str, ...]:
    ratio = _time_ratio(each, data)
    return (
        f"{each['knob']} {value(each['value'])}",
        gib(_middle(each)),
        _percent(_memory(each, data)),
        "-" if ratio is None else _percent(ratio - 1),
        each["fits"],
    )


def _percent(change: float) -> str:
    return f"{change:+.0%}" if abs(change) >= _NOTICED else "0%"


def _middle(data: Mapping[str, Any]) -> int:
    return (int(data["device_bytes"]["low"]) + int(data["device_bytes"]["high"])) // 2


def _memory(each: Mapping[str, Any], data: Mapping[str, Any]) -> float:
    return _middle(each) / _middle(data) - 1


def _time_ratio(each: Mapping[str, Any], data: Mapping[str, Any]) -> float | None:
    return each["step_seconds"] / data["step_seconds"] if each["step_seconds"] else None


def _largest(data: Mapping[str, Any]) -> list[str]:
    sizes = [f"{_SIZES[name]} {size or 'none'}" for name, size in data["largest"].items()]
    return [f"Largest that fits, all else as it is: {', '.join(sizes)}."] if sizes else []


def _card(card: Mapping[str, Any], unit: str) -> tuple[str, ...]:
    needs = _interval(card) if card["device_bytes"] else "-"
    rate = card[f"{unit}_per_second"]
    return card["name"], f"{card['memory_bytes'] / GIB:.1f}", card["fits"], needs, number(rate) if rate else "-"
