"""A store for each card, and what a lent machine leaves."""

from dataclasses import replace
from pathlib import Path

import pytest

from autofit.core.errors import InputError
from benchmarks.gpu import run
from benchmarks.gpu.cards import described, slug, stores, take
from benchmarks.gpu.store import Store
from tests.tiny import CPU


def left_by(path: Path, card: str, *keys: str) -> Path:
    store = Store(path)
    store.add("about", "", described(replace(CPU, name=card)))
    for key in keys:
        store.add("listed", key, {"of": card})
    return path


def test_names_of_cards_are_names_of_directories() -> None:
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert slug("../../etc") == "etc"
    assert slug("") == "unnamed"


def test_each_card_has_its_own_store(tmp_path: Path) -> None:
    results = tmp_path / "gpu"
    first = take(left_by(tmp_path / "a.jsonl", "NVIDIA H100", "x", "y"), results)
    assert take(left_by(tmp_path / "b.jsonl", "NVIDIA H100", "z"), results) == first
    other = take(left_by(tmp_path / "c.jsonl", "NVIDIA H200", "x"), results)
    assert stores(results) == [first, other]
    assert list(Store(first / "items.jsonl").rows("listed")) == ["x", "y", "z"]
    assert list(Store(other / "items.jsonl").rows("listed")) == ["x"]


def test_a_store_that_names_no_card_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    Store(path).add("listed", "x", {})
    with pytest.raises(InputError, match="does not say which card"):
        take(path, tmp_path / "gpu")


def test_results_are_told_of_each_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for card in ("NVIDIA H100", "NVIDIA H200"):
        take(left_by(tmp_path / f"{card}.jsonl", card), tmp_path / "gpu")
    assert run.main(["--tell", "--out", str(tmp_path)]) == 0
    assert "NVIDIA H100" in (told := capsys.readouterr().out) and "NVIDIA H200" in told
    assert run.main(["--tell", "--card", "NVIDIA H200", "--out", str(tmp_path)]) == 0
    assert "NVIDIA H100" not in capsys.readouterr().out
