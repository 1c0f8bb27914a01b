"""The benchmark of levers runs, has a row for every optimizer that is not compiled, and predicts to the byte."""

import json
from pathlib import Path

import pytest

from autofit.techniques import technique_named
from benchmarks import levers

OPTIMIZER = technique_named("optimizer")


@pytest.mark.filterwarnings("ignore")  # transformers and bitsandbytes warn of each other's ways
def test_smoke_prints_and_writes_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    levers.main(["--smoke", "--out", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = {row["name"]: row for table in figures.values() for row in table}
    assert {value for value in OPTIMIZER.values if not OPTIMIZER.compiles(value)} <= rows.keys()
    assert {name for name, row in rows.items() if row["needs"]} == {
        "paged-adamw",
        "paged-adamw-8bit",
        "fused",
    }
    for name, row in rows.items():
        if row["predicted_bytes"] is not None:
            assert row["predicted_bytes"] == row["peak_bytes"], name
    assert "| adamw |" in capsys.readouterr().out
