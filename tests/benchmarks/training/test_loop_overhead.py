"""The benchmark of the loop runs, and its figures that are no timings are right."""

import contextlib
import json
from pathlib import Path

import pytest

from autofit.probe import LocalExecutor
from benchmarks import loop_overhead


@pytest.mark.usefixtures("shared_zygote")
def test_smoke_prints_and_writes_every_figure(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    executor: LocalExecutor,
) -> None:
    monkeypatch.setattr(loop_overhead, "LocalExecutor", lambda: contextlib.nullcontext(executor))
    assert loop_overhead.main(["--smoke", "--out", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [each["ranks"] for each in figures["overhead"]] == [1, 1, 1, 1, 2]
    assert figures["cut_gradients"] < 1e-6
    assert {each["name"] for each in figures["reached"]} == {"train.py", "autofit train"}
    assert all(0.8 < each["peak"] < 1.1 for each in figures["reached"])
    out = capsys.readouterr().out
    assert "by hand" in out
    assert "of the probe's tokens a second" in out
