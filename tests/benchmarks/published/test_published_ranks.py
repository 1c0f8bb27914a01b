"""The prediction of rows of several cards."""

import pytest

from benchmarks import published_ranks
from benchmarks.published_ranks import outcome_of
from benchmarks.published_runs import rows

ROWS = {row["id"]: row for row in rows("published_multi_gpu")}


def test_a_row_is_predicted_as_a_step_of_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_ranks, "_traits", {})
    told = outcome_of(ROWS["llmfoundry-149"])
    assert told.work == 104 * 512 * int(ROWS["llmfoundry-149"]["grad_accum"])
    assert 0.7 < told.ratio < 1.4


def test_tokens_of_a_context_group_are_shared() -> None:
    row = {**ROWS["torchtitan-008"], "parallelism": "FSDP 4, CP 2"}
    assert outcome_of(row).work == 65536 / 2
