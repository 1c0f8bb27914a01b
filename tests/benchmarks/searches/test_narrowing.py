"""What is left of a narrowed space is compared with all of it, by tier."""

from collections.abc import Sequence
from unittest import mock

import pytest

from autofit.core.config import Config
from benchmarks import narrowing
from benchmarks.gpu.cases import TINY

GIB = 2**30


def predicted(
    workload: object, hardware: object, configs: Sequence[Config], *, processes: int | None
) -> tuple[list[float], list[float]]:
    """As if ddp took half as long and twice the memory, and `selective` paid under it alone, by a fifth."""
    nbytes, seconds = [], []
    for each in configs:
        ddp = each["data_parallel"] == "ddp"
        pays = ddp and each["activation_checkpointing"] == "selective"
        nbytes.append(2.0 * GIB if ddp else GIB)
        seconds.append(2.0 - ddp - 0.2 * pays)
    return nbytes, seconds


def test_within_each_budget_the_best_of_each_tier_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {
        "precision": ("bf16",),
        "activation_checkpointing": ("full", "selective", "none"),
        "lora_rank": (0,),
    }
    monkeypatch.setattr(narrowing, "predict_all", predicted)
    with mock.patch.object(narrowing, "SPACE", small):
        rows = narrowing.compared(str(TINY), "h100", 2, [0.5, 1.5, 80.0])
    # nothing fits in 0.5
    assert [(row["gpu_mem"], row["tier"]) for row in rows] == [(1.5, "full"), (80.0, "full")]
    assert [row["slower"] for row in rows] == [0.0, 0.0]
    assert all(0 < row["asked"] <= row["configs"] for row in rows)
