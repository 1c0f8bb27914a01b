"""The rows as one Markdown table, with what they come to."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.markdown import table
from benchmarks.gpu.stage import Table

SETTINGS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
LEVERS = {"lora": "LoRA", "checkpointing": "checkpointing", "nf4": "nf4"}
WANTED = "at least 95% of families; error's median below 0.1%, 95% of rows within 1%, none more than 2% too low"
# What a remedy begins with: every refusal is to say what to do instead.
_REMEDY = re.compile(
    r"\b(use|set|give|leave|write|correct|check|install|train|measuring works|download|look at|see|add|choose|pass|"
    r"supported are|search)\b",
    re.IGNORECASE,
)
_MOST_WORDS = 90

Row = Mapping[str, Any]


def is_sentence(message: str) -> bool:
    """Whether a refusal is one line that says what is wrong and what to do instead, and no traceback."""
    short = len(message.split()) <= _MOST_WORDS and "\n" not in message.strip()
    return (
        short
        and "Traceback" not in message
        and message.strip().endswith(".")
        and bool(_REMEDY.search(message))
    )


def refused_well(answer: Row) -> bool:
    """Whether a lever works, or is refused as it should be."""
    return answer["outcome"] == "works" or (
        answer["outcome"] == "refused" and is_sentence(answer["message"])
    )


def problems(row: Row) -> list[str]:
    """Why a family does not work from end to end, in the order in which a user would meet it; [] where it does."""
    if "left_out" in row:
        return [f"left out: {_last(row['left_out'])}"]
    if "failed" in row:
        return [f"row: {_last(row['failed'])}"]
    if row["looked_at"]["outcome"] != "works":
        return [f"model: {_last(row['looked_at']['message'])}"]
    found = []
    full = row["settings"]["full"]
    for name, answer in (
        ("estimate", full["prediction"]),
        ("probe", full["probe"]),
        ("search", row["search"]),
    ):
        if answer and answer["outcome"] != "works":
            found.append(f"{name}: {_last(answer['message'])}")
    if row.get("command") and row["command"]["outcome"] != "works":
        found.append(f"command line: {_last(row['command']['message'])}")
    for name, answer in row["levers"].items():
        if not refused_well(answer):
            found.append(f"{name}: {_last(answer['message'])}")
    for name, figures in row["settings"].items():
        if (
            figures["probe"]["outcome"] == "works" != figures["prediction"]["outcome"]
            and name != "full"
        ):
            found.append(f"estimate of {name}: {_last(figures['prediction']['message'])}")
    return list(dict.fromkeys(found))


def errors(rows: Iterable[Row], setting: str) -> list[float]:
    """Relative to the probe's peak; positive where too much was predicted."""
    return [found[setting] for row in rows if setting in (found := errors_of(row))]


def errors_of(row: Row) -> dict[str, float]:
    """The errors of a row, by setting."""
    figures = row.get("settings") or {}
    known = {name: each for name, each in figures.items() if each["predicted"] and each["probed"]}
    return {name: each["predicted"] / each["probed"] - 1 for name, each in known.items()}


@dataclass(frozen=True)
class Summary:
    """Errors of one setting: without their sign, and the lowest with it."""

    rows: int
    median: float
    most: float  # of 95 % of the rows
    lowest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary | None:
        """None where there are none."""
        if not values:
            return None
        sizes = sorted(map(abs, values))
        most = sizes[max(0, -(-len(sizes) * 95 // 100) - 1)]
        return cls(len(sizes), statistics.median(sizes), most, min(0.0, *values))


def document(rows: Mapping[str, Row], notes: Sequence[str]) -> str:
    """All of it."""
    left_out = [
        (key.split("/")[-2], row["left_out"][:150])
        for key, row in rows.items()
        if "left_out" in row
    ]
    rows = {key: row for key, row in rows.items() if "left_out" not in row}
    parts = ["# Families, each from end to end", *notes]
    parts += [table(_numbers(rows)), table(_causes(rows)), table(_rows(rows))]
    if left_out:
        parts.append(
            table(
                Table(
                    "Left out: transformers cannot build or train it here",
                    ("family", "why"),
                    left_out,
                )
            )
        )
    return "\n\n".join(parts) + "\n"


def _numbers(rows: Mapping[str, Row]) -> Table:
    working = sum(not problems(row) for row in rows.values())
    searched = sum(bool(row.get("search")) for row in rows.values())
    share = (
        f"{working} of {len(rows)}: {working / max(1, len(rows)):.1%} ({searched} of them searched)"
    )
    lines: list[tuple[str | None, ...]] = [
        ("families that work from end to end", share, None, None, None)
    ]
    for setting, title in SETTINGS.items():
        if found := Summary.of(errors(rows.values(), setting)):
            figures = (f"{found.median:.4%}", f"{found.most:.3%}", f"{found.lowest:.2%}")
            lines.append((f"error of predicted memory, {title}", f"{found.rows} rows", *figures))
    return Table(
        f"What they come to (wanted: {WANTED})", ("", "", "median", "95 % within", "lowest"), lines
    )


def _causes(rows: Mapping[str, Row]) -> Table:
    """What keeps families from working, the most frequent first: only the first problem of each."""
    first = {key: found[0] for key, row in rows.items() if (found := problems(row))}
    counts = Counter(map(_cause, first.values()))
    lines = []
    for cause, count in counts.most_common():
        names = [key.split("/")[-2] for key, each in first.items() if _cause(each) == cause]
        lines.append((str(count), cause, ", ".join(names)))
    return Table("What keeps families from it", ("families", "cause", "which"), lines)


def _cause(problem: str) -> str:
    """A problem without names and numbers that differ from family to family."""
    text = re.sub(r"(the config of|config\.json is of|for|by) [\w./-]+", r"\1 NAME", problem)
    return re.sub(r"\[?\b\d[\d, ]*\]?", "N", text)[:220]


def _rows(rows: Mapping[str, Row]) -> Table:
    head = (
        "family",
        "task",
        "parameters",
        "estimate",
        "search",
        *LEVERS.values(),
        *SETTINGS.values(),
        "message",
        "s",
    )
    return Table("Families", head, [_line(key, row) for key, row in sorted(rows.items())])


def _line(key: str, row: Row) -> tuple[str | None, ...]:
    library, _, rest = key.partition("/")
    family, _, task = rest.rpartition("/")
    name = family if library == "transformers" else f"{library}: {family}"
    messages = problems(row)
    if not row.get("settings"):
        return (name, task, *[None] * 9, "; ".join(messages), None)
    levers = [row["levers"][lever] for lever in LEVERS]
    full = row["settings"]["full"]["prediction"]
    marks = [_mark(full), _mark(row["search"]), *map(_mark, levers)]
    refusals = [
        each["message"]
        for each in levers
        if each["outcome"] == "refused" and is_sentence(each["message"])
    ]
    return (
        name,
        task,
        f"{row['parameters']:,}",
        *marks,
        *(
            f"{found[setting]:+.3%}" if setting in (found := errors_of(row)) else None
            for setting in SETTINGS
        ),
        " ".join(dict.fromkeys((*messages, *refusals))) or None,
        f"{row['seconds']:.0f}",
    )


def _mark(answer: Row | None) -> str | None:
    return (
        answer and {"works": "yes", "refused": "refused", "fails": "**fails**"}[answer["outcome"]]
    )


def _last(text: str) -> str:
    """The last line of a message, which says what an error is."""
    lines = text.strip().splitlines() or [""]
    return re.sub(r"\S*/config\.json", "config.json", lines[-1].strip())[:400]
