from pathlib import Path

import pytest

from benchmarks import estimate_space

FEW = """
description: a few
knobs:
  precision: [bf16]
  micro_batch_size: all
  activation_checkpointing: [full, none]
"""


def test_the_smoke_run_prints_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.yaml").write_text(FEW)
    estimate_space.main(
        ["--smoke", "--space", str(tmp_path / "few.yaml"), "--out", str(tmp_path / "figures.json")]
    )
    assert "ranks of bytes" in capsys.readouterr().out
    assert (tmp_path / "figures.json").is_file()


def test_ranks_that_agree_correlate_whatever_the_values() -> None:
    assert estimate_space.spearman([1, 2, 30], [5, 60, 700]) == pytest.approx(1.0)
    assert estimate_space.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
