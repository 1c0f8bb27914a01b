"""Two runs beside one another: what differs in what was asked and where, and in what came out."""

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

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Comparison:
    """In which facts two runs differ, and what that comes to.

    Attributes:
        names: of the runs.
        setup, outcome: the facts that differ of what was asked and where, and of what came out.
        sentences: what they come to.
    """

    names: tuple[str, str]
    setup: tuple[Row, ...]
    outcome: tuple[Row, ...]
    sentences: tuple[str, ...]

    def to_markdown(self) -> str:
        """For a pull request."""
        title = markdown_text(" and ".join(self.names))
        parts = [f"### {title}"]
        parts += map(markdown_text, self.sentences)
        for name, rows in self._tables:
            header = (name, *self.names)
            parts.append(table(header, rows))

        return "\n\n".join(parts) + "\n"

    def to_terminal(self) -> RenderableType:
        """For a console of any width."""
        tables = []
        for name, rows in self._tables:
            header = (name, *self.names)
            columns = [Column(Text(title), overflow="fold") for title in header]
            shown = fmt.table(*columns)
            for row in rows:
                shown.add_row(*map(Text, row))
            tables.append(shown)

        return Group(*tables, *map(Text, self.sentences))

    @property
    def _tables(self) -> list[tuple[str, tuple[Row, ...]]]:
        """The titles and the rows of the tables that have some."""
        tables = [("setup", self.setup), ("result", self.outcome)]
        return [(title, rows) for title, rows in tables if rows]


def compare(first: Record, second: Record, names: tuple[str, str]) -> Comparison:
    """The differences between two runs."""
    facts = _setup(first)
    others = _setup(second)
    setup = []
    for name in facts | others:
        mine = facts.get(name, "-")
        its = others.get(name, "-")
        if mine != its:
            setup.append((name, mine, its))

    outcome = _outcome(first.result, second.result)
    sentences = _sentences(first.result, second.result, names)
    return Comparison(
        names=names,
        setup=tuple(setup),
        outcome=tuple(outcome),
        sentences=tuple(sentences),
    )


def _setup(record: Record) -> dict[str, str]:
    """What was asked and where, by name."""
    result = record.result
    options = record.options
    hardware = result.hardware
    facts: dict[str, Any] = {"model": result.model}
    for name, fact in result.workload.items():
        facts[name.replace("_", " ")] = fact

    margin = None
    if hardware.device != "cpu":
        margin = percent(result.budget.margin)
    facts |= {
        "device": hardware.name,
        "measured on": hardware.measured_on,
        "cores": hardware.cores,
        "budget GiB": gib(result.budget.device_bytes),
        "margin": margin,
        "space": options.get("space") or "default",
        "configs in the space": f"{result.space_size:,}",
    }
    for knob, given in (options.get("set") or {}).items():
        facts[f"--set {knob}"] = given
    for name in ("workers", "seed", "tolerance"):
        facts[name] = options.get(name)
    facts |= result.versions

    return {name: values(fact) for name, fact in facts.items() if fact is not None}


def _outcome(first: Result, second: Result) -> list[Row]:
    """The facts of what came out."""
    rows = []
    for name in TIERS:
        one = first.tiers.get(name)
        other = second.tiers.get(name)
        if one or other:
            mine = _figures(one, first)
            its = _figures(other, second)
            rows.append((f"best of {name}", mine, its))

    if first.best and second.best:
        differences = first.best.config.differences(second.best.config)
        for knob, both in differences.items():
            mine, its = map(value, both)
            rows.append((f"best: {knob}", mine, its))

    rows.append(
        (
            "probes",
            str(len(first.trials)),
            str(len(second.trials)),
        )
    )
    seconds = (f"{first.search_seconds:.0f}", f"{second.search_seconds:.0f}")
    rows.append(("search, seconds", *seconds))
    return rows


def _figures(measurement: Measurement | None, result: Result) -> str:
    """Speed and memory of a tier's best, or why there is none."""
    if measurement is None:
        if result.best is None and result.stopped_by != "prediction":
            return "nothing fitted"
        return "none measured"

    figures = rate(measurement)
    peak = peak_gib(measurement)
    if peak:
        figures += f", {peak} GiB"

    return figures


def _sentences(first: Result, second: Result, names: tuple[str, str]) -> list[str]:
    """What the differences come to."""
    is_same_work = first.model == second.model and first.workload == second.workload
    lines = []
    if not is_same_work:
        lines.append("They trained different things, so that their speeds do not compare.")

    are_measured = True
    for name, result in zip(names, (first, second), strict=True):
        if result.stopped_by == "prediction":
            are_measured = False
            lines.append(f"In {name} nothing was measured: all is predicted.")

    if first.best and second.best:
        lines += _of_bests(first.best, second.best, names, is_same_work=is_same_work)
    elif are_measured and (first.best or second.best):
        fits, not_fits = names
        if second.best:
            not_fits, fits = names
        lines.append(f"In {fits} something fits, in {not_fits} nothing does.")

    if is_same_work:
        lines += _both_measured(first, second, names)

    return lines


def _of_bests(
    first: Measurement,
    second: Measurement,
    names: tuple[str, str],
    *,
    is_same_work: bool,
) -> list[str]:
    """How the best of each run compare in speed, and in what they differ."""
    lines = []
    if is_same_work:
        how = speed(second.throughput / first.throughput)
        lines.append(f"Against the best of {names[0]}, that of {names[1]} is {how}.")

    choice = "Both chose the same config."
    if first.config != second.config:
        differing = changes(second.config, first.config)
        choice = f"The best of {names[1]} differs in: {', '.join(differing)}."

    return [*lines, choice]


def _both_measured(first: Result, second: Result, names: tuple[str, str]) -> list[str]:
    """What the machine or the versions alone changed of the speed, by the configs that both
    measured."""
    ratios = []
    shared = []
    for config, mine in first.latest_by_config.items():
        its = second.latest_by_config.get(config)
        if its is None or not mine.fits or not its.fits or not mine.throughput:
            continue

        shared.append(config)
        ratios.append(its.throughput / mine.throughput)

    if not shared:
        return []

    _, last = names
    middle = speed(statistics.median(ratios))
    if len(shared) == 1:
        one = f"One config was measured to fit in both, {describe(shared[0])}"
        return [f"{one}: in {last} it is {middle}."]

    count = f"{len(shared)} configs were measured to fit in both"
    spread = f"from {min(ratios):.2f} to {max(ratios):.2f} times the speed"
    return [f"{count}: in {last} they are {middle} in the median ({spread})."]
