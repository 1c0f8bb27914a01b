"""Two runs beside one another: what changed in what was asked and where, and what in what came out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.core.measurement import Measurement
from autofit.core.record import Record
from autofit.core.result import TIERS, Result
from autofit.report.formatting import changes, describe, gib, peak_bytes, percent, rate, speed, value
from autofit.report.markdown import plain, table
from autofit.report.rows import latest_by_config

_NONE = "-"

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Comparison:
    """Two runs by name, in which facts of the setup and of the result they differ, and what that comes to in words."""

    names: tuple[str, str]
    setup: tuple[Row, ...]
    outcome: tuple[Row, ...]
    sentences: tuple[str, ...]

    def to_markdown(self) -> str:
        """For a pull request."""
        parts = [f"### {plain(self.names[0])} and {plain(self.names[1])}", *map(plain, self.sentences)]
        for title, rows in (("setup", self.setup), ("result", self.outcome)):
            if rows:
                parts.append(table((title, *self.names), rows))
        return "\n\n".join(parts) + "\n"

    def to_terminal(self) -> RenderableType:
        """For a console of any width."""
        shown: list[RenderableType] = []
        for title, rows in (("setup", self.setup), ("result", self.outcome)):
            if rows:
                grid = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, expand=False)
                for name in (title, *self.names):
                    grid.add_column(Text(name), overflow="fold")
                for row in rows:
                    grid.add_row(*map(Text, row))
                shown.append(grid)
        return Group(*shown, *map(Text, self.sentences))


def compare(first: Record, second: Record, names: tuple[str, str]) -> Comparison:
    """What is not the same in two runs."""
    one, other = _setup(first), _setup(second)
    setup = [(name, one.get(name, _NONE), other.get(name, _NONE)) for name in dict.fromkeys((*one, *other))]
    return Comparison(
        names,
        tuple(row for row in setup if row[1] != row[2]),
        tuple(_outcome(first.result, second.result)),
        tuple(_sentences(first.result, second.result, names)),
    )


def _setup(record: Record) -> dict[str, str]:
    result, options = record.result, record.options
    hardware = result.hardware
    told: dict[str, Any] = {
        "model": result.model,
        **{name.replace("_", " "): each for name, each in result.workload.items()},
        "device": hardware.name,
        "measured on": hardware.measured_on,
        "cores": hardware.cores,
        "budget GiB": gib(result.budget.device_bytes),
        "margin": percent(result.budget.margin) if hardware.device != "cpu" else None,
        "space": options.get("space") or "default",
        "configs in the space": f"{result.space_size:,}",
        **{f"--set {knob}": given for knob, given in (options.get("set") or {}).items()},
        "workers": options.get("workers"),
        "seed": options.get("seed"),
        "tolerance": options.get("tolerance"),
        **result.versions,
    }
    return {name: _written(each) for name, each in told.items() if each is not None}


def _written(given: Any) -> str:
    return ",".join(map(value, given)) if isinstance(given, list | tuple) else value(given)


def _outcome(first: Result, second: Result) -> list[Row]:
    rows = []
    for name in TIERS:
        one, other = first.tiers.get(name), second.tiers.get(name)
        if one or other:
            rows.append((f"best of {name}", _told(one, first), _told(other, second)))
    knobs = first.best and second.best and first.best.config.differences(second.best.config)
    rows += [(f"best: {knob}", value(mine), value(theirs)) for knob, (mine, theirs) in (knobs or {}).items()]
    rows.append(("probes", str(len(first.trials)), str(len(second.trials))))
    rows.append(("search, seconds", f"{first.search_seconds:.0f}", f"{second.search_seconds:.0f}"))
    return rows


def _told(measurement: Measurement | None, result: Result) -> str:
    if measurement is None:
        return "nothing fitted" if result.best is None and not _predicted(result) else "none measured"
    peak = peak_bytes(measurement)
    return f"{rate(measurement)}{f', {gib(peak)} GiB' if peak else ''}"


def _sentences(first: Result, second: Result, names: tuple[str, str]) -> list[str]:
    same_work = first.model == second.model and first.workload == second.workload
    told = [] if same_work else ["They trained different things, so that their speeds do not compare."]
    told += [f"In {name} nothing was measured: all is predicted." for name in _names_of_predicted(first, second, names)]
    if first.best and second.best:
        if same_work:
            ratio = second.best.throughput / first.best.throughput
            told.append(f"Against the best of {names[0]}, that of {names[1]} is {speed(ratio)}.")
        if first.best.config == second.best.config:
            told.append("Both chose the same config.")
        else:
            told.append(
                f"The best of {names[1]} differs in: {', '.join(changes(second.best.config, first.best.config))}."
            )
    elif (first.best or second.best) and not (_predicted(first) or _predicted(second)):
        fits, not_fits = names if first.best else names[::-1]
        told.append(f"In {fits} something fits, in {not_fits} nothing does.")
    return [*told, *(_both_measured(first, second, names) if same_work else ())]


def _names_of_predicted(first: Result, second: Result, names: tuple[str, str]) -> list[str]:
    return [name for name, result in zip(names, (first, second), strict=True) if _predicted(result)]


def _predicted(result: Result) -> bool:
    return result.stopped_by == "prediction"


def _both_measured(first: Result, second: Result, names: tuple[str, str]) -> list[str]:
    """What the machine or the versions alone made of the speed: by the configs that both measured."""
    mine, theirs = latest_by_config(first), latest_by_config(second)
    ratios = _ratios(mine, theirs)
    if not ratios:
        return []
    slowest, middle, fastest = min(ratios), statistics.median(ratios), max(ratios)
    if len(ratios) == 1:
        config = next(config for config in mine if config in theirs and mine[config].fits and theirs[config].fits)
        return [f"One config was measured to fit in both, {describe(config)}: in {names[1]} it is {speed(middle)}."]
    told = f"{len(ratios)} configs were measured to fit in both: in {names[1]} they are {speed(middle)} in the median"
    return [f"{told} (from {slowest:.2f} to {fastest:.2f} times the speed)."]


def _ratios(mine: Mapping[Any, Measurement], theirs: Mapping[Any, Measurement]) -> list[float]:
    both = ((mine[config], theirs[config]) for config in mine if config in theirs)
    return [other.throughput / one.throughput for one, other in both if one.fits and other.fits and one.throughput]
