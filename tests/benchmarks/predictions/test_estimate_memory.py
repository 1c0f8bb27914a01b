"""The benchmark of predicted against measured memory runs, goes on where it ended, and the figures agree."""

import contextlib
import json
from pathlib import Path

import pytest

from autofit.probe import LocalExecutor
from benchmarks import estimate_memory
from benchmarks.estimate_memory import Row, summaries, summary_of


def test_prints_and_writes_what_was_predicted_and_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    executor: LocalExecutor,
) -> None:
    monkeypatch.setattr(estimate_memory, "LocalExecutor", lambda: contextlib.nullcontext(executor))
    out = tmp_path / "figures.json"
    arguments = ["--models", "tiny-llama", "--configs", "2", "--eager", "--out", str(out)]
    assert estimate_memory.main(arguments) == 0
    figures = json.loads(out.read_text())
    assert [row["config"] for row in figures["rows"]] == ["{}", '{"precision": "bf16"}']
    assert all(row["allocated"] >= row["probed"] > 50 * 2**20 for row in figures["rows"])
    assert figures["summaries"]["all"]["worst"] < 1e-4
    assert figures["summaries"]["precision=bf16"]["rows"] == 1
    assert "tiny-llama" in capsys.readouterr().out

    figures["rows"][0]["probed"] = 1  # figures in the file are not measured again
    out.write_text(json.dumps(figures))
    estimate_memory.main([*arguments, "--again", "--configs", "1"])
    again = json.loads(out.read_text())["rows"]
    assert again[0]["probed"] == 1
    assert again[0]["predicted"] == figures["rows"][0]["predicted"]


def test_what_ends_otherwise_is_a_row_with_its_reason(executor: LocalExecutor) -> None:
    refused = Row("tiny-llama", '{"activation_checkpointing": "budget-0.5"}')
    row = estimate_memory.completed(executor, refused, again=False)
    assert row.predicted is None
    assert row.probed is row.allocated is None
    assert row.reason is not None and "set compile default" in row.reason
    assert row.error is None


def test_scratch_memory_in_kernels_is_measured_apart(executor: LocalExecutor) -> None:
    knobs = {"precision": "bf16", "micro_batch_size": 2, "optimizer": "sgd"}
    row = estimate_memory.completed(
        executor, Row("cnn", estimate_memory.written(knobs)), again=False
    )
    assert row.error == pytest.approx(0, abs=1e-4), row
    assert row.scratch is not None and row.scratch > 0.001, row


def test_every_model_has_sixty_configs_that_differ() -> None:
    for model in ("vit", "cnn"):
        configs = estimate_memory.configs_of(model, count=estimate_memory.CONFIGS, seed=0)
        plain = [each for each in configs if not estimate_memory.compiles(each)]
        assert len(set(plain)) == len(plain) == estimate_memory.CONFIGS >= 60
        assert configs[: len(plain)] == plain
        assert len(configs) > len(plain)


def test_summaries_take_errors_without_their_sign_and_keep_compiled_configs_apart() -> None:
    rows = [
        Row("vit", '{"precision": "bf16"}', False, 90, 100, 130),
        Row("vit", "{}", False, 102, 100, 110),
        Row("cnn", "{}", False, None, 100, 100, "predict: no"),
        Row("cnn", '{"compile": "default"}', True, 150, 100, 100),
    ]
    found = summaries(rows)
    assert found["all"].rows == 2
    assert found["all"].worst == pytest.approx(0.1)
    assert found["all"].median == pytest.approx(0.06)
    assert (found["all"].scratch_median, found["all"].scratch_worst) == pytest.approx((0.2, 0.3))
    assert found["precision=bf16"].worst == pytest.approx(0.1)
    assert found["compiled"].worst == pytest.approx(0.5)
    assert "cnn" not in found
    assert summary_of([]) is None
