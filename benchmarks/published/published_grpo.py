"""Predicted against published memory of GRPO: `python -m benchmarks.published_grpo`.

Each row of data/published_grpo.csv is predicted as `autofit.plan_grpo` does it, but with all logits
of completions at once (loss: standard), as TRL computed them when these were published. Nothing is fitted to the
rows; what a publisher does not say is taken as TRL's defaults of then, and the row's note says so.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from autofit.api.estimate import predict
from autofit.core.hardware import GIB
from autofit.core.tasks.grpo import GRPO as TASK
from autofit.core.workload import Workload
from autofit.models import preset_model, resolve
from autofit.models.generation import cache_bytes
from autofit.models.losses import GRPO
from benchmarks.published_runs import rows

CARD = "h200"


def predicted_bytes(row: dict[str, str]) -> float:
    """What autofit says of a row: a cache, or the middle of a training's interval."""
    if row["what"] == "cache":
        config = preset_model(row["model"]).transformers_config()
        tokens = int(row["prompt_len"]) + int(row["completion_len"])
        return cache_bytes(config, tokens, itemsize=2) * int(row["micro_batch"])

    config = {
        "precision": row["dtype"],
        "micro_batch_size": int(row["micro_batch"]),
        "activation_checkpointing": row["checkpointing"],
    }
    if row["lora_r"]:
        config |= {"lora_rank": int(row["lora_r"]), "lora_targets": "all-linear"}
    estimate = predict(workload_of(row), config, gpu=CARD).estimate
    return (estimate.low + estimate.high) / 2


def workload_of(row: dict[str, str]) -> Workload:
    """A step of one micro-batch of the row."""
    completion = int(row["completion_len"])
    workload = resolve(
        row["model"],
        task=TASK.name,
        sequence_length=int(row["prompt_len"]) + completion,
        effective_batch_size=int(row["micro_batch"]),
    )
    loss = GRPO()
    batch: Any = workload.batch
    batch = dataclasses.replace(batch, completion_length=completion, loss=loss)
    return dataclasses.replace(workload, batch=batch, loss=loss)


def main() -> int:
    """Print each row with its factor."""
    print("| id | what | predicted GiB | published GiB | factor |")
    print("|---|---|---:|---:|---:|")
    for row in rows("published_grpo"):
        found = predicted_bytes(row) / GIB
        factor = found / float(row["gib"])
        print(f"| {row['id']} | {row['what']} | {found:.2f} | {row['gib']} | {factor:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
