"""Measures a list of configs on the card that is here, one line of JSON each: `card_probes.py OUT LIST SECONDS`.

For minutes on a lent machine (`first.sh`). The rows go into OUT/items.jsonl. `python -m benchmarks.gpu --take` adds
them to the results of their card, and `--estimate-again` predicts them, neither of which needs the card.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from autofit.probe import LocalExecutor
from benchmarks.gpu.cards import described
from benchmarks.gpu.listed import measure_list, read_list
from benchmarks.gpu.store import Store

_PROBE_SECONDS = 90.0  # a case may ask for less


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what of the list is not stored yet, as long as there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("list", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    end = time.monotonic() + given.seconds

    store = Store(given.out / "items.jsonl")
    with LocalExecutor(given.out / "logs", _PROBE_SECONDS) as executor:
        hardware = executor.detect(given.device)
        store.add("about", "", described(hardware))
        measure_list(
            store, executor, hardware, read_list(given.list), left=lambda: end - time.monotonic()
        )


if __name__ == "__main__":
    main()
