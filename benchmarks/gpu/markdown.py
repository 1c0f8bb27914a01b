"""The results as Markdown: the numbers to reach, then stage by stage what became of it, its tables and its notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.stage import Summary, Table
from benchmarks.gpu.wanted import Verdict

_REACHED = {True: "yes", False: "**no**", None: "not measured"}


def document(
    about: Mapping[str, Any],
    verdicts: Sequence[Verdict],
    stages: Sequence[tuple[Mapping[str, Any], Summary]],
) -> str:
    """All of it; each stage is (its row in the store, what it tells)."""
    parts = [
        _head(about),
        table(_numbers(verdicts, judged=not about["smoke"])),
        table(_stages(stages)),
    ]
    for row, told in stages:
        parts += [table(each) for each in told.tables]
        if told.notes:
            parts.append(
                "\n".join(
                    [f"Notes of {row['stage']}:", "", *(f"- {_line(note)}" for note in told.notes)]
                )
            )
    return "\n\n".join(parts) + "\n"


def _head(about: Mapping[str, Any]) -> str:
    hardware, versions = about["hardware"], about["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# autofit on one card, measured"
        if not about["smoke"]
        else "# Rehearsal on a CPU with tiny models",
        "",
        f"{hardware['name']}, {hardware['memory_bytes'] / 2**30:.1f} GiB, {hardware['cores']} cores; {about['begun']}.",
        f"{packages}; driver {about['driver'] or 'none'}.",
    ]
    if about["smoke"]:
        lines.append(
            "These figures say only that every stage runs; none of them says anything about autofit."
        )
    return "\n".join(lines)


def _numbers(verdicts: Iterable[Verdict], *, judged: bool) -> Table:
    rows = [
        (each.text, each.wanted, each.seen, _REACHED[each.reached] if judged else None)
        for each in verdicts
    ]
    return Table("Numbers to reach", ("number", "wanted", "seen", "reached"), rows)


def _stages(stages: Iterable[tuple[Mapping[str, Any], Summary]]) -> Table:
    rows = []
    for row, told in stages:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in told.figures.items())
        outcome = row["outcome"] + (f": {row['reason']}" if row.get("reason") else "")
        rows.append((row["stage"], outcome, f"{row['seconds']:.0f}", figures))
    return Table("Stages", ("stage", "outcome", "seconds", "figures"), rows)


def table(given: Table) -> str:
    """One table under its title."""
    lines = [f"## {given.title}", "", _row(given.head), _row(["---"] * len(given.head))]
    return "\n".join([*lines, *(_row(row) for row in given.rows)])


def _row(cells: Sequence[str | None]) -> str:
    return f"| {' | '.join('-' if cell is None else _line(cell) for cell in cells)} |"


def _line(text: str) -> str:
    """Text that breaks no table."""
    return " ".join(text.split()).replace("|", "\\|")


def shown(value: Any) -> str:
    """A figure with the digits that it is good for."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)
