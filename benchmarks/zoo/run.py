"""Every family of models from end to end: whether it is predicted, searched, adapted, checkpointed and quantised, how
far off its predicted memory is, and what is told where it is refused. `python -m benchmarks.zoo [--only NAME ...]`.

Tiny models of every family of transformers that has a training task, of timm, torchvision, diffusers and
sentence-transformers where they are installed, and plain PyTorch ones. A row is kept as soon as it is measured, so a
killed run goes on. A row that crashes, or takes too long, is a row with that as its result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autofit.core.environment import versions
from benchmarks.gpu.store import Store
from benchmarks.zoo.families import Family, families
from benchmarks.zoo.table import document, errors_of, problems
from benchmarks.zoo.workers import ROW_SECONDS, Worker

RESULTS = Path(__file__).parents[1] / "results"
STAGE = "zoo"
WELL = 1e-3  # of a prediction


def main(arguments: list[str] | None = None) -> int:
    """Measure the rows that are not known yet, and write the table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families, tasks or libraries")
    parser.add_argument("--fresh", action="store_true", help="measure again what is known")
    parser.add_argument(
        "--again", action="store_true", help="measure again what did not work, or not well"
    )
    parser.add_argument("--no-search", action="store_true", help="leave searches to a later run")
    parser.add_argument("--row-seconds", type=float, default=ROW_SECONDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    given = parser.parse_args(arguments)
    found, lacking = families()
    print(*lacking, sep="\n")
    store, start = Store(given.out / "zoo.jsonl"), time.monotonic()
    with Worker(given.row_seconds) as worker:
        for family in (each for each in found if wanted(each, given.only)):
            known = store.get(STAGE, family.key)
            measured = known is None or given.fresh or (given.again and not fine(known))
            row = worker.row(family) if measured else known
            lacks_search = not given.no_search and row.get("settings") and not row["search"]
            if lacks_search:
                row = row | worker.row(family, searched=True)
            if measured or lacks_search:
                store.add(STAGE, family.key, row)
                print(shown(family, row), flush=True)
    rows = {each.key: row for each in found if (row := store.get(STAGE, each.key)) is not None}
    (given.out / "zoo.md").write_text(document(rows, [*lacking, _versions()]), encoding="utf-8")
    print(f"{len(rows)} rows, {time.monotonic() - start:.0f} s")
    return 0


def wanted(family: Family, names: Sequence[str] | None) -> bool:
    """Whether a family is among those asked for."""
    return not names or bool({family.name, family.task, *family.library.split("/")} & set(names))


def fine(row: dict[str, Any]) -> bool:
    """Whether a family works, and its memory is predicted well."""
    return not problems(row) and all(abs(error) < WELL for error in errors_of(row).values())


def shown(family: Family, row: dict[str, Any]) -> str:
    """One line."""
    told = "; ".join(problems(row)) or "works"
    figures = " ".join(f"{error:+.3%}" for error in errors_of(row).values())
    return f"{family.key:60} {row.get('seconds', 0):4.0f} s {figures} {told}"[:400]


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items() if version) + "."
