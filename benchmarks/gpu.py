"""One command that checks and measures autofit on a CUDA machine: `python -m benchmarks.gpu`.

The most valuable stages come first and each is bounded in time, so that a few minutes of a card still yield something.
A stage that is done is not run again while its results lie in --out. `--smoke` runs every stage on the CPU with a tiny
model, so that the command itself never rots.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.stages import STAGES, Bench

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run the stages asked for; returns 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all stages together (9)")
    parser.add_argument("--stage", action="append", choices=list(STAGES), help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for results and run directories")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, with a tiny model")
    given = parser.parse_args(arguments)
    bench = Bench(given.out / ("gpu-smoke" if given.smoke else "gpu"), given.smoke)
    bench.directory.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.minutes * 60
    rows = [_run(name, bench, deadline) for name in given.stage or STAGES]
    (bench.directory / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    table = markdown(rows)
    (bench.directory / "results.md").write_text(table)
    print(table)
    return int(any(row["outcome"] == "failed" for row in rows))


def _run(name: str, bench: Bench, deadline: float) -> dict[str, Any]:
    """One stage: from its stored result when it is done, else run within the time that is left."""
    stored = bench.directory / f"{name}.json"
    if stored.exists():
        done: dict[str, Any] = json.loads(stored.read_text())
        return done
    left = deadline - time.monotonic()
    if left < bench.least_seconds:
        return {"stage": name, "outcome": "no time left", "figures": {}}
    print(f"{name}: at most {left:.0f} s", file=sys.stderr, flush=True)
    start = time.monotonic()
    outcome, figures = STAGES[name](bench, left)
    row = {"stage": name, "outcome": outcome, "seconds": round(time.monotonic() - start, 1), "figures": figures}
    if outcome == "done":
        stored.write_text(json.dumps(row, indent=1) + "\n")
    return row


def markdown(rows: list[dict[str, Any]]) -> str:
    """The results as one table."""
    lines = ["| stage | outcome | seconds | figures |", "|---|---|---|---|"]
    for row in rows:
        figures = ", ".join(f"{name} {value}" for name, value in row["figures"].items())
        lines.append(f"| {row['stage']} | {row['outcome']} | {row.get('seconds', '')} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
