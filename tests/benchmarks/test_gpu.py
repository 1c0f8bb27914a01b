"""The one command for CUDA machines, rehearsed on the CPU."""

import json
from pathlib import Path

from benchmarks import gpu


def test_smoke_runs_every_stage_and_writes_both_results(tmp_path: Path) -> None:
    assert gpu.main(["--smoke", "--out", str(tmp_path), "--minutes", "4"]) == 0

    rows = {row["stage"]: row for row in json.loads((tmp_path / "gpu-smoke" / "results.json").read_text())}
    assert list(rows) == ["correct", "search", "loop"]
    assert rows["search"]["figures"]["probes"] == 2
    assert rows["loop"]["figures"]["against the probe"] > 0
    assert "| loop | done |" in (tmp_path / "gpu-smoke" / "results.md").read_text()

    finished = {path.name: path.read_text() for path in (tmp_path / "gpu-smoke").glob("*.json")}
    assert gpu.main(["--smoke", "--out", str(tmp_path)]) == 0, "done stages are read, not run again"
    assert {path.name: path.read_text() for path in (tmp_path / "gpu-smoke").glob("*.json")} == finished
