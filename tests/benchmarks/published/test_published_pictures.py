"""Published memory of training denoisers: every row can be predicted, and is, of a small model in its place."""

from pathlib import Path

import pytest

from benchmarks import published_pictures
from benchmarks.published_runs import rows
from tests.models.diffusion.small import write_pipeline


# of a frozen norm in 16 bits, whose input autocast leaves in 32
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("row", rows("published_pictures"), ids=lambda row: row["id"])
def test_a_row_is_predicted(
    row: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = "flux" if row["model"].startswith("flux") else "sd"
    folder = write_pipeline(tmp_path / kind, kind)
    small = row | {"model": str(folder), "resolution": "64x96", "prompt_tokens": "8"}
    low, high = published_pictures.predicted_gb(small)
    assert 0 < low < high < float(row["gb"])

    monkeypatch.setattr(published_pictures, "rows", lambda _: [row])
    monkeypatch.setattr(published_pictures, "predicted_gb", lambda _: (8.0, 10.0))
    kept = tmp_path / "table.md"
    published_pictures.main(["--output", str(kept)])
    shown = capsys.readouterr().out
    assert f"| {row['id']} | {row['source']} | 8.0 to 10.0 | {row['gb']} |" in shown
    assert kept.read_text(encoding="utf-8").endswith(shown)
