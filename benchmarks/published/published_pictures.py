"""Predicted against published memory of training denoisers: `python -m benchmarks.published_pictures`.

Each row of data/published_pictures.csv is predicted as `autofit estimate` does it, on the card that it names: the
publisher's, or an H100, whose context may be larger. Nothing is fitted to the rows. `--output` keeps the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from autofit.api.estimate import predict
from benchmarks.published_runs import rows

_HEAD = (
    "`python -m benchmarks.published_pictures --output benchmarks/results/published_pictures.md`\n"
)


def predicted_gb(row: dict[str, str]) -> tuple[float, float]:
    """The ends of the interval that autofit gives a row, in 10^9 bytes."""
    config = {
        "precision": row["precision"],
        "micro_batch_size": int(row["micro_batch"]),
        "activation_checkpointing": row["checkpointing"],
        "lora_rank": int(row["lora_r"]),
        "lora_targets": row["lora_targets"] or None,
        "quantization": row["quantization"],
        "optimizer": row["optimizer"],
    }
    estimate = predict(
        row["model"],
        config,
        gpu=row["card"],
        resolution=row["resolution"],
        seq_len=int(row["prompt_tokens"]),
        effective_batch=int(row["micro_batch"]) * int(row["accumulation"]),
    ).estimate
    return estimate.low / 1e9, estimate.high / 1e9


def table() -> str:
    """Each row with the middle of its interval against what was published, and their median."""
    lines = ["| id | source | predicted GB | published GB | factor |", "|---|---|---:|---:|---:|"]
    factors = []
    for row in rows("published_pictures"):
        low, high = predicted_gb(row)
        factor = (low + high) / 2 / float(row["gb"])
        factors.append(factor)
        lines.append(
            f"| {row['id']} | {row['source']} | {low:.1f} to {high:.1f} | {row['gb']} | {factor:.2f} |"
        )

    off = statistics.median(abs(factor - 1) for factor in factors)
    lines += ["", f"In the median {off:.0%} off, of {len(factors)} rows."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and keep it where `--output` says."""
    parser = argparse.ArgumentParser(prog="benchmarks.published_pictures")
    parser.add_argument(
        "--output", type=Path, help="such as benchmarks/results/published_pictures.md"
    )
    output = parser.parse_args(arguments).output
    text = table()
    print(text, end="")
    if output is not None:
        output.write_text(f"{_HEAD}\n{text}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
