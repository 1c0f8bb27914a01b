"""What other tools do with the files that autofit exports: three steps of tiny-llama by each tool's own command, beside
autofit's own three steps of the same config, weights and samples. `python -m benchmarks.exports_train`; 20 s a case.

Compared are the loss of each step, the tracked peak of the last one and the bytes of the optimizer's state. What is not
as measured has to be announced by the export. `--python` names the interpreter that has the tools, if it is not this
one; what is known of other tools stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import autofit
from autofit.core.layout import Layout
from benchmarks.export_runs import Taken, canonical, ours, staged, taken
from benchmarks.tool_runs import CASES, RUNS

RESULTS = Path(__file__).parents[1] / "results" / "exports_train.json"
# As much as may be off unannounced. A loss that is not trained at all is off by 10 %; older transformers, which
# LLaMA-Factory asks for, divide it by one label a sample too many: 0.8 % here.
MEMORY, LOSS = 0.05, 0.01
# beginnings of knobs that change losses
_LEARNS_OTHERWISE = ("precision", "optimizer", "quantization", "lora")
_MORE, _LESS = "It may no longer fit.", "less memory"
_RUNS = ("ours", "theirs")


@dataclass(frozen=True)
class Row:
    """One config in one tool. `announced`: what the export says that it does otherwise; `failed`: why the tool did not
    train."""

    tool: str
    version: str
    case: str
    devices: int
    announced: tuple[str, ...]
    ours: Taken
    theirs: Taken | None = None
    failed: str | None = None

    @property
    def loss(self) -> float:
        """The largest relative difference between the losses of a step."""
        assert self.theirs
        pairs = zip(self.theirs.losses, self.ours.losses, strict=True)
        return max((theirs / own - 1 for theirs, own in pairs), key=abs)

    @property
    def memory(self) -> float:
        """The relative difference between the peaks."""
        assert self.theirs
        return self.theirs.peak_bytes / self.ours.peak_bytes - 1

    @property
    def state(self) -> float:
        """The difference between the optimizers' states, relative to the peak: SGD has none."""
        assert self.theirs
        return (self.theirs.state_bytes - self.ours.state_bytes) / self.ours.peak_bytes

    @property
    def differences(self) -> dict[str, float]:
        """What is not as measured."""
        if self.theirs is None:
            return {}
        shares = {"loss": self.loss, "memory": self.memory, "state": self.state}
        return {
            name: share
            for name, share in shares.items()
            if abs(share) > (LOSS if name == "loss" else MEMORY)
        }

    @property
    def wrong(self) -> str | None:
        """What the export should have announced, or None."""
        if self.failed:
            return f"it does not train: {self.failed}"
        assert self.theirs
        if not self.theirs.losses[-1] < self.theirs.losses[0]:
            return f"its loss does not fall: {self.theirs.losses}"
        unannounced = (
            f"{name} {share:+.1%}"
            for name, share in self.differences.items()
            if not self._says(name)
        )
        return ", ".join(unannounced) or None

    def _says(self, what: str) -> bool:
        if what == "loss":
            return any(each.startswith(_LEARNS_OTHERWISE) for each in self.announced)
        words = _MORE if self.differences[what] > 0 else _LESS
        return any(words in each for each in self.announced)


def rows(
    tool: str,
    python: str,
    folder: Path,
    cases: Sequence[str] = (),
    known: dict[str, Taken] | None = None,
) -> Iterator[Row]:
    """Each of the tool's cases, run by an interpreter that has the tool. A failure is a row, but one of our own run, of
    which `known` keeps what it took for other tools."""
    known = {} if known is None else known
    stage = staged(folder / "stage")
    for case in cases or RUNS[tool].cases:
        config = canonical(stage, CASES[case])
        places = {name: folder / case / name for name in ("ours", tool)}
        for place in places.values():
            place.mkdir(parents=True)
        if case not in known:
            known[case] = ours(stage, config, places["ours"])
        export = autofit.export(stage.result(config, folder / case), to=tool, output=None)
        for name, text in export.files.items():
            (places[tool] / name).write_text(text)
        theirs, failed = None, None
        try:
            command = [python, *RUNS[tool].command(stage, config, places[tool])]
            theirs = taken(command, places[tool], RUNS[tool].environment)
        except RuntimeError as error:
            failed = str(error)
        said = tuple(each.message for each in export.departures)
        yield Row(
            tool, export.version, case, Layout.of(config).world, said, known[case], theirs, failed
        )


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    if not path.exists():
        return []
    return [_row(each) for each in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def _row(data: dict[str, Any]) -> Row:
    runs = {
        name: data[name] and Taken(**{**data[name], "losses": tuple(data[name]["losses"])})
        for name in _RUNS
    }
    return Row(**{**data, **runs, "announced": tuple(data["announced"])})


def write(path: Path, rows: Sequence[Row]) -> None:
    """Row by row, so that two files can be compared."""
    lines = ",\n".join(
        json.dumps(asdict(row)) for row in sorted(rows, key=lambda row: (row.tool, row.case))
    )
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def told(row: Row) -> str:
    """A line."""
    if row.theirs is None:
        return f"{row.tool} {row.case}: WRONG, {row.wrong}"
    share = f"memory {row.memory:+.2%}, state {row.state:+.2%}, loss {row.loss:+.3%}"
    verdict = (
        f"WRONG, {row.wrong}" if row.wrong else "announced" if row.differences else "as measured"
    )
    return f"{row.tool} {row.case}: {share}: {verdict}"


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for docs/exports.md: of each tool how many configs it trained, how far its memory is off, and where that is
    what its file announces."""
    lines = []
    for tool in RUNS:
        trained = [row for row in rows if row.tool == tool and row.theirs]
        if not trained:
            continue
        exact, others = (
            [row for row in trained if bool(row.differences) is off] for off in (False, True)
        )
        most = f"{max(abs(row.memory) for row in exact):.1%}" if exact else "-"
        told = ", ".join(f"{row.case} {row.memory:+.0%}" for row in others)
        if not exact:
            told = "all, {:+.0%} to {:+.0%}".format(
                *(end(row.memory for row in others) for end in (min, max))
            )
        several = sum(row.devices > 1 for row in trained)
        lines.append(
            f"| {tool} | {trained[0].version} | {len(trained)}, {several} of them on 2 ranks | {most} | {told or '-'} |"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write what is new beside what is known; 1 where an export is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tool", action="append", choices=list(RUNS), help="one of them; all without"
    )
    parser.add_argument(
        "--case", action="append", choices=list(CASES), default=[], help="one of the tool's cases"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter that has the tool"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    found = {(row.tool, row.case): row for row in read(given.out)}
    wrong, known = 0, dict[str, Taken]()
    for tool in given.tool or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(tool, given.python, Path(folder), given.case, known):
                print(told(row), flush=True)
                found[row.tool, row.case] = row
                wrong += row.wrong is not None
                write(given.out, list(found.values()))
    print("\n".join(table(list(found.values()))))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
