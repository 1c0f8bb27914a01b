"""The prediction of rows of several cards."""

import pytest

from autofit.core.hardware import GIB
from benchmarks import published_ranks
from benchmarks.published_ranks import memory_table, outcome_of
from benchmarks.published_runs import rows, run_of
from benchmarks.published_speed import work_of

ROWS = {row["id"]: row for row in rows("published_multi_gpu")}


def test_a_row_is_predicted_as_a_step_of_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_ranks, "_traits", {})
    told = outcome_of(ROWS["llmfoundry-149"])
    assert told.work == 104 * 512 * int(ROWS["llmfoundry-149"]["grad_accum"])
    assert 0.7 < told.ratio < 1.4


def test_tokens_of_a_context_group_are_shared() -> None:
    workload, _, _ = run_of(ROWS["torchtitan-008"])  # FSDP 4, CP 2
    assert work_of(ROWS["torchtitan-008"], workload) == 65536 / 2


def test_memory_is_held_against_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_ranks, "memory_of", lambda row: float(row["mem_value"]) * 1.1 * GIB)
    told = memory_table([ROWS["fms-012"], ROWS["torchtitan-001"]])
    assert "| fms-012 | Mistral-7B-v0.1 | 37.11 | 33.74 | +10.0% |" in told
    assert "median error 10.0%, bias +10.0%, 100% within 12 %" in told
