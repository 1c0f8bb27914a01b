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
TOOLS = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "ms-swift": "ms-swift"}
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
    """

    tool: str
    found: Mapping[str, Row]
    left_out: Mapping[str, str]
    parsed: Sequence[Row]

    @classmethod
    def read(cls, tool: str, folder: Path = RESULTS) -> "Rows":
        """Those of a folder."""
        reasons = yaml.safe_load(LEFT_OUT.read_text())[tool]
        left_out = {}
        for reason, files in reasons.items():
            left_out |= dict.fromkeys(files, reason)

        parsed = results_of(folder / "parsers" / f"{tool}.jsonl")
        found = results_of(folder / f"{tool}.jsonl")
        return cls(tool, found, left_out, list(parsed.values()))

    @property
    def counted(self) -> dict[str, Row]:
        """The files that could be tuned."""
        return {name: row for name, row in self.found.items() if name not in self.left_out}

    @property
    def tuned(self) -> int:
        """How many of them were."""
        return sum(row["outcome"] == "tuned" for row in self.counted.values())


def summary(tools: Sequence[Rows]) -> str:
    """The whole page."""
    counted = sum(len(rows.counted) for rows in tools)
    tuned = sum(rows.tuned for rows in tools)
    lines = [
        "# What came of the published files",
        "",
        "Written by `python -m benchmarks.exports.corpus_summary` from the rows in this folder.",
        "Each file was tuned by prediction (`python -m benchmarks.exports.corpus`), for 4 cards of",
        "80 GiB where it does not say how many and nothing else is said below.",
        "",
        f"**{tuned} of {counted}** files that can be tuned were: {tuned / counted:.1%}"
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
        "",
        "| tool | tuned files read | taken | refused before they were tuned | refused since |",
        "|---|---|---|---|---|",
    ]
    further = []
    for rows in tools:
        verdicts = [judged(row["before"], row["after"]) for row in rows.parsed]
        counts = [verdicts.count(kind) for kind in ("taken", "refused before", "refused")]
        numbers = " | ".join(str(count) for count in counts)
        lines.append(f"| {TOOLS[rows.tool]} | {len(verdicts)} | {numbers} |")

        for row, verdict in zip(rows.parsed, verdicts, strict=True):
            if verdict != "taken":
                said = " ".join(str(row["after"]).split())
                further.append(f"- {TOOLS[rows.tool]}, `{row['file']}`, {verdict}: {said}")
    return [*lines, "", *further] if further else lines


def _card(row: Row) -> str:
    return f"{row['devices']} x {row['gpu_mem']:g} GiB, {row['time_limit']:g} s"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: list[str] | None = None) -> int:
    """Write the page; 1 where fewer files were tuned than wanted, or a parser refuses a tuned one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(arguments)

    tools = [Rows.read(tool) for tool in TOOLS]
    (RESULTS / "README.md").write_text(summary(tools))
    counted = sum(len(rows.counted) for rows in tools)
    tuned = sum(rows.tuned for rows in tools)
    print(f"{tuned} of {counted} tuned: {tuned / counted:.1%}")
    return 0 if tuned >= _WANTED * counted else 1


if __name__ == "__main__":
    sys.exit(main())
