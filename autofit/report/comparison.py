"""Two runs beside one another: what changed in what was asked and where, and what in what came out."""

import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from autofit.core.measurement import Measurement
from autofit.core.quoting import markdown_text
from autofit.core.record import Record
from autofit.core.result import TIERS, Result
from autofit.report import formatting as fmt
from autofit.report.formatting import (
    changes,
    describe,
    gib,
    peak_gib,
    percent,
    rate,
    speed,
    value,
    values,
)
from autofit.report.markdown import table
from autofit.report.rows import latest_by_config

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
        parts = [
            f"### {markdown_text(' and '.join(self.names))}",
            *map(markdown_text, self.sentences),
        ]
        parts += [table((title, *self.names), rows) for title, rows in self._tables]
        return "\n\n".join(parts) + "\n"

    def to_terminal(self) -> RenderableType:
        """For a console of any width."""
        tables = []
        for title, rows in self._tables:
            tables.append(
                fmt.table(*(Column(Text(name), overflow="fold") for name in (title, *self.names)))
            )
            for row in rows:
                tables[-1].add_row(*map(Text, row))
        return Group(*tables, *map(Text, self.sentences))

    @property
    def _tables(self) -> list[tuple[str, tuple[Row, ...]]]:
        return [
            (title, rows)
            for title, rows in (("setup", self.setup), ("result", self.outcome))
            if rows
        ]


def compare(first: Record, second: Record, names: tuple[str, str]) -> Comparison:
    """The differences between two runs."""
    setups = _setup(first), _setup(second)
    rows = [
        (name, setups[0].get(name, "-"), setups[1].get(name, "-"))
        for name in {**setups[0], **setups[1]}
    ]
    results = first.result, second.result
    setup = tuple(row for row in rows if row[1] != row[2])
    return Comparison(names, setup, tuple(_outcome(*results)), tuple(_sentences(*results, names)))


def _setup(record: Record) -> dict[str, str]:
    result, options = record.result, record.options
    hardware = result.hardware
    facts: dict[str, Any] = {
        "model": result.model,
        **{name.replace("_", " "): fact for name, fact in result.workload.items()},
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
    return {name: values(fact) for name, fact in facts.items() if fact is not None}


def _outcome(first: Result, second: Result) -> list[Row]:
    rows = []
    for name in TIERS:
        one, other = first.tiers.get(name), second.tiers.get(name)
        if one or other:
            rows.append((f"best of {name}", _figures(one, first), _figures(other, second)))
    knobs = first.best and second.best and first.best.config.differences(second.best.config)
    rows += [
        (f"best: {knob}", value(mine), value(other))
        for knob, (mine, other) in (knobs or {}).items()
    ]
    rows.append(("probes", str(len(first.trials)), str(len(second.trials))))
    rows.append(("search, seconds", f"{first.search_seconds:.0f}", f"{second.search_seconds:.0f}"))
    return rows


def _figures(measurement: Measurement | None, result: Result) -> str:
    if measurement is None:
        return (
            "nothing fitted"
            if result.best is None and result.stopped_by != "prediction"
            else "none measured"
        )
    peak = peak_gib(measurement)
    return f"{rate(measurement)}{f', {peak} GiB' if peak else ''}"


def _sentences(first: Result, second: Result, names: tuple[str, str]) -> list[str]:
    same_work = first.model == second.model and first.workload == second.workload
    lines = (
        [] if same_work else ["They trained different things, so that their speeds do not compare."]
    )
    for name, result in zip(names, (first, second), strict=True):
        if result.stopped_by == "prediction":
            lines.append(f"In {name} nothing was measured: all is predicted.")
    if first.best and second.best:
        if same_work:
            ratio = second.best.throughput / first.best.throughput
            lines.append(f"Against the best of {names[0]}, that of {names[1]} is {speed(ratio)}.")
        differing = ", ".join(changes(second.best.config, first.best.config))
        same = first.best.config == second.best.config
        lines.append(
            "Both chose the same config."
            if same
            else f"The best of {names[1]} differs in: {differing}."
        )
    elif (first.best or second.best) and "prediction" not in (first.stopped_by, second.stopped_by):
        fits, not_fits = names if first.best else names[::-1]
        lines.append(f"In {fits} something fits, in {not_fits} nothing does.")
    return [*lines, *(_both_measured(first, second, names) if same_work else ())]


def _both_measured(first: Result, second: Result, names: tuple[str, str]) -> list[str]:
    """What the machine or the versions alone changed of the speed, by the configs that both measured."""
    mine, others = latest_by_config(first), latest_by_config(second)
    both = (
        config
        for config, one in mine.items()
        if config in others and one.fits and others[config].fits
    )
    ratios = {
        each: others[each].throughput / mine[each].throughput
        for each in both
        if mine[each].throughput
    }
    if not ratios:
        return []
    middle = speed(statistics.median(ratios.values()))
    if len(ratios) == 1:
        (config,) = ratios
        return [
            f"One config was measured to fit in both, {describe(config)}: in {names[1]} it is {middle}."
        ]
    spread = f"from {min(ratios.values()):.2f} to {max(ratios.values()):.2f} times the speed"
    how_many = f"{len(ratios)} configs were measured to fit in both"
    return [f"{how_many}: in {names[1]} they are {middle} in the median ({spread})."]
