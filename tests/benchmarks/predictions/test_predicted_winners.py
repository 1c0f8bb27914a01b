import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import predicted_winners
from benchmarks.predicted_winners import Row

ROW = Row("a", "h100", "lora", 0.0, 0.012, {"loss": "fused"}, 20.0, 500)


def test_goes_on_with_what_the_file_lacks_and_prints_the_worst_of_each_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[tuple[str, str]] = []

    def rows_of(model: str, gpu: str, seq_len: int | None) -> Iterator[Row]:
        searched.append((model, gpu))
        yield Row(model, gpu, "lora", 0.003, 0.0, {}, 10.0, 400)

    monkeypatch.setattr(predicted_winners, "rows_of", rows_of)
    out = tmp_path / "winners.json"
    out.write_text(json.dumps([vars(ROW)]))
    predicted_winners.main(["--models", "a", "b", "--gpus", "h100", "--out", str(out)])
    assert searched == [("b", "h100")]
    assert [row["model"] for row in json.loads(out.read_text())] == ["a", "b"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "lora: at most 0.30% by one change and 1.20% by two, in 2 searches"


def test_a_row_names_the_change_that_would_be_better() -> None:
    assert predicted_winners.line_of(ROW) == (
        "a on h100, lora: 0.00% by one change, 1.20% by two (loss fused) of 500; searched in 20 s"
    )


def test_twelve_models_on_five_cards() -> None:
    assert len(set(predicted_winners.MODELS)) == 12
    assert len(set(predicted_winners.GPUS)) == 5
