"""The two commands of a quarter of an hour on a card, rehearsed on the CPU as they stand."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.store import Store
from tests import warm

ROOT = Path(__file__).resolve().parents[3]


def rehearsed(script: str, out: Path, python: str) -> str:
    environment = {**os.environ, "REHEARSAL": "1", "OUT": str(out), "PYTHON": python}
    command = ["bash", f"benchmarks/gpu/{script}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400, method="thread")
def test_a_quarter_of_an_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    # imports take longer than all else that is rehearsed
    with warm.python_for_scripts(tmp_path) as python:
        first = rehearsed("first.sh", out, python)
        second = rehearsed("second.sh", out, python)
    for step in ("versions and what they lack", "search", "configs of a list", "end"):
        assert f"s: {step}" in first
    assert "writing the result and the report" in (out / "search.log").read_text()

    rows = Store(out / "items.jsonl").rows("listed")
    assert rows["LoRA on nf4"]["measurement"]["outcome"] == "fits"
    assert rows["full, profiled"]["profiled"]["count"] > 0
    assert "liger" in rows["liger"]["left_out"], "what cannot run is left out with a word"

    assert "s: train.py" in second
    assert "loss" in (out / "train_py.log").read_text()
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((out / "result.json").read_text())["best"]

    assert run.main(["--take", str(out / "items.jsonl"), "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run.main(["--estimate-again", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "## Configs of a list" in told
    assert "## Predictions by kind" in told
    assert "LoRA on nf4, resident" in told
