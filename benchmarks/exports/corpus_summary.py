"""What came of the published files, as Markdown: `python -m benchmarks.exports.corpus_summary`.

Written from the rows that `benchmarks.exports.corpus` and `benchmarks.exports.corpus_parsers` keep,
beside them as README.md. Files that need what is not there (corpus_left_out.yaml says what) do not
count.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.exports.corpus import results_of
from benchmarks.exports.corpus_parsers import judged

RESULTS = Path(__file__).parents[1] / "results" / "corpus"
LEFT_OUT = Path(__file__).with_name("corpus_left_out.yaml")
PUBLISHED = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "ms-swift": "ms-swift"}
# Whose files lie below corpus_own: they are written here, and do not count among the published ones.
OWN = {"trl": "TRL", "transformers": "transformers"}
TOOLS = PUBLISHED | OWN
_USUAL = (4, 80.0)  # devices, and GiB of each
_WANTED = 0.85

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """What came of a tool's files.

    Attributes:
        tool: its name among the results.
        found: the last row of each file.
        left_out: the files that do not count, with the reason.
        parsed: what the tool's own parser said of the tuned files.
        drawn: the same of files changed to configs drawn at random.
    """

    tool: str
    found: Mapping[str, Row]
    left_out: Mapping[str, str]
    parsed: Sequence[Row]
    drawn: Sequence[Row] = ()

    @classmethod
    def read(cls, tool: str, folder: Path = RESULTS) -> "Rows":
        """Those of a folder."""
        reasons = yaml.safe_load(LEFT_OUT.read_text()).get(tool, {})
        left_out = {}
        for reason, files in reasons.items():
            left_out |= dict.fromkeys(files, reason)

        found = results_of(folder / f"{tool}.jsonl")
        parsed = results_of(folder / "parsers" / f"{tool}.jsonl")
        drawn = results_of(folder / "drawn" / f"{tool}.jsonl")
        return cls(tool, found, left_out, list(parsed.values()), list(drawn.values()))

    @property
    def counted(self) -> dict[str, Row]:
        """The files that could be tuned."""
        return {name: row for name, row in self.found.items() if name not in self.left_out}

    @property
    def tuned(self) -> int:
        """How many of them were."""
        return sum(row["outcome"] == "tuned" for row in self.counted.values())

    @property
    def refused(self) -> int:
        """How many changed files the parser refuses that it took as they were."""
        rows = (*self.parsed, *self.drawn)
        return sum(judged(row["before"], row["after"]) == "refused" for row in rows)


def tuned_of_published(tools: Sequence[Rows]) -> tuple[int, int]:
    """How many of the published files were tuned, and how many could be."""
    published = [rows for rows in tools if rows.tool in PUBLISHED]
    tuned = sum(rows.tuned for rows in published)

    return tuned, sum(len(rows.counted) for rows in published)


def summary(tools: Sequence[Rows]) -> str:
    """The whole page."""
    tuned, counted = tuned_of_published(tools)
    lines = [
        "# What came of the published files",
        "",
        "Written by `python -m benchmarks.exports.corpus_summary` from the rows in this folder.",
        "Each file was tuned by prediction (`python -m benchmarks.exports.corpus`), for 4 cards of",
        "80 GiB where it does not say how many and nothing else is said below. Those of TRL and",
        "transformers are written here (benchmarks/exports/corpus_own), and stand beside the others.",
        "",
        f"**{tuned} of {counted}** published files that can be tuned were: {tuned / counted:.1%}"
        f" (wanted: {_WANTED:.0%}).",
        "",
        "| tool | files | left out | could be tuned | tuned | share |",
        "|---|---|---|---|---|---|",
    ]
    for rows in tools:
        could = len(rows.counted)
        lines.append(
            f"| {TOOLS[rows.tool]} | {len(rows.found)} | {len(rows.left_out)} | {could} "
            f"| {rows.tuned} | {rows.tuned / could:.0%} |"
        )

    for heading, section in (
        ("Left out", _left_out),
        ("Not tuned", _not_tuned),
        ("Tuned for other cards", _other_cards),
        ("Read by the tools' own parsers", _parsed),
        ("Changed at random, and read by the same parsers", _drawn),
    ):
        lines += ["", f"## {heading}", "", *section(tools)]
    return "\n".join(lines) + "\n"


def _left_out(tools: Sequence[Rows]) -> list[str]:
    """The files that do not count, by reason."""
    lines = ["They need what is not there.", ""]
    for rows in tools:
        for reason in dict.fromkeys(rows.left_out.values()):
            names = [name for name, why in rows.left_out.items() if why == reason]
            lines.append(f"- {TOOLS[rows.tool]}, {reason}: {_listed(names)}")
    return lines


def _not_tuned(tools: Sequence[Rows]) -> list[str]:
    """The files that count and were not tuned, with what was said."""
    lines = []
    for rows in tools:
        for name, row in sorted(rows.counted.items()):
            if row["outcome"] != "tuned":
                said = " ".join(str(row["said"]).split()).removeprefix(f"{name} cannot be tuned: ")
                tried_on = f" ({_card(row)})" if row["outcome"] == "no answer" else ""
                lines.append(f"- {TOOLS[rows.tool]}, `{name}`{tried_on}: {said}")
    return lines or ["None."]


def _other_cards(tools: Sequence[Rows]) -> list[str]:
    """The files that took a larger card, or another number of them."""
    lines = []
    for rows in tools:
        for name, row in sorted(rows.counted.items()):
            is_usual = (row["devices"], row["gpu_mem"]) == _USUAL
            if row["outcome"] == "tuned" and not is_usual:
                lines.append(f"- {TOOLS[rows.tool]}, `{name}`: {_card(row)}")
    return lines or ["None."]


def _parsed(tools: Sequence[Rows]) -> list[str]:
    """How many of the tuned files each parser takes, and what it says of the others."""
    lines = [
        "By `python -m benchmarks.exports.corpus_parsers`, on the files as they were and as tuned;",
        "what a parser refuses untouched cannot be held against tuning.",
    ]
    parsed = {rows.tool: rows.parsed for rows in tools}

    return lines + _read(parsed, "tuned", listed=("refused before", "refused"))


def _drawn(tools: Sequence[Rows]) -> list[str]:
    """The same of files changed at random, of which only those are listed that it should take."""
    lines = [
        "By `python -m benchmarks.exports.corpus_drawn`: of each file that can be tuned several,",
        "each as tuning would write it if a config drawn at random were its answer.",
    ]
    drawn = {rows.tool: rows.drawn for rows in tools}

    return lines + _read(drawn, "changed", listed=("refused",))


def _read(found: Mapping[str, Sequence[Row]], done: str, listed: Sequence[str]) -> list[str]:
    """What the parsers say of files, by tool.

    Args:
        done: what was done to the files, as a participle.
        listed: the verdicts whose files are listed with what was said.
    """
    lines = [
        "",
        f"| tool | {done} files read | taken | refused before they were {done} | refused since |",
        "|---|---|---|---|---|",
    ]
    further = []
    for tool, rows in found.items():
        lines.append(_counts(tool, rows))
        for row in rows:
            verdict = judged(row["before"], row["after"])
            if verdict in listed:
                further.append(_said(tool, row, verdict))

    return [*lines, "", *further] if further else lines


def _counts(tool: str, rows: Sequence[Row]) -> str:
    """A line of a table: how many files there are of each kind."""
    verdicts = [judged(row["before"], row["after"]) for row in rows]
    counts = [verdicts.count(kind) for kind in ("taken", "refused before", "refused")]
    numbers = " | ".join(str(count) for count in counts)

    return f"| {TOOLS[tool]} | {len(verdicts)} | {numbers} |"


def _said(tool: str, row: Row, verdict: str) -> str:
    """What a parser says of a changed file."""
    said = " ".join(str(row["after"]).split())
    return f"- {TOOLS[tool]}, `{row['file']}`, {verdict}: {said}"


def _card(row: Row) -> str:
    return f"{row['devices']} x {row['gpu_mem']:g} GiB, {row['time_limit']:g} s"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: list[str] | None = None) -> int:
    """Write the page; 1 where fewer were tuned than wanted, or a parser refuses a changed file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(arguments)

    tools = [Rows.read(tool) for tool in TOOLS]
    (RESULTS / "README.md").write_text(summary(tools))
    tuned, counted = tuned_of_published(tools)
    print(f"{tuned} of {counted} tuned: {tuned / counted:.1%}")
    is_enough = tuned >= _WANTED * counted
    refused = sum(rows.refused for rows in tools)

    return 0 if is_enough and not refused else 1


if __name__ == "__main__":
    sys.exit(main())
