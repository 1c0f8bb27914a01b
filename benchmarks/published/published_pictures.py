"""Predicted against published memory of training denoisers: `python -m benchmarks.published_pictures`.

Each row of data/published_pictures.csv is predicted as `autofit estimate` does it, on an H100, whose context may be
larger than that of the publisher's card. Nothing is fitted to the rows.
"""

from __future__ import annotations

import sys

from autofit.api.estimate import predict
from benchmarks.published_runs import rows

CARD = "h100"


def predicted_gb(row: dict[str, str]) -> tuple[float, float]:
    """The ends of the interval that autofit gives a row, in 10^9 bytes."""
    config = {
        "precision": row["precision"],
        "micro_batch_size": 1,
        "activation_checkpointing": row["checkpointing"],
        "lora_rank": int(row["lora_r"]),
        "lora_targets": row["lora_targets"],
        "quantization": row["quantization"],
        "optimizer": row["optimizer"],
    }
    estimate = predict(
        row["model"],
        config,
        gpu=CARD,
        resolution=row["resolution"],
        seq_len=int(row["prompt_tokens"]),
        effective_batch=1,
    ).estimate
    return estimate.low / 1e9, estimate.high / 1e9


def main() -> int:
    """Print each row with the middle of its interval against what was published."""
    print("| id | predicted GB | published GB | factor |")
    print("|---|---:|---:|---:|")
    for row in rows("published_pictures"):
        low, high = predicted_gb(row)
        factor = (low + high) / 2 / float(row["gb"])
        print(f"| {row['id']} | {low:.1f} to {high:.1f} | {row['gb']} | {factor:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
