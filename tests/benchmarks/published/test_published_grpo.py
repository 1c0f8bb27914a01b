"""Published memory of GRPO: every row can be predicted, and the cache is as published."""

import pytest

from autofit.core.hardware import GIB
from benchmarks.published_grpo import predicted_bytes, workload_of
from benchmarks.published_runs import rows

ROWS = {row["id"]: row for row in rows("published_grpo")}


def test_the_cache_of_a_sequence_is_as_published() -> None:
    row = ROWS["unsloth-cache"]
    assert predicted_bytes(row) / GIB == pytest.approx(float(row["gib"]), rel=0.06)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row["what"] != "cache"])
def test_a_step_is_one_micro_batch_of_the_row(name: str) -> None:
    row = ROWS[name]
    workload = workload_of(row)
    batch = workload.batch(int(row["micro_batch"]))
    completion = int(row["completion_len"])
    tokens = int(row["prompt_len"]) + completion
    assert batch["labels"].shape == (int(row["micro_batch"]), tokens)
    assert batch["old"].shape[1] == completion
    assert workload.effective_batch_size == int(row["micro_batch"])
    assert row["source"].startswith("https://")
