"""The command keeps each row as it is measured, goes on where it ended, and writes the table."""

import json
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks.zoo import run
from benchmarks.zoo.families import Family
from tests.benchmarks.zoo.test_table import GOOD, row

FOUND = [Family("transformers", "llama", "causal-lm"), Family("plain/images", "gan", "custom")]


class Answering:
    """A worker whose rows are made up."""

    asked: list[str]

    def __init__(self, seconds: float) -> None:
        assert seconds > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def row(self, family: Family, *, searched: bool = False) -> dict[str, Any]:
        self.asked.append(f"{family.name} searched" if searched else family.name)
        if searched:
            return {"search": GOOD, "command": None}
        return {"failed": "took more than 1 s"} if family.name == "gan" else row(search=None)


def test_rows_are_measured_once_and_what_did_not_work_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Answering.asked = []
    monkeypatch.setattr(run, "Worker", Answering)
    monkeypatch.setattr(
        run, "families", lambda: (FOUND, ["timm is left out: no module named timm."])
    )
    out = ["--out", str(tmp_path)]
    assert run.main([*out, "--only", "causal-lm"]) == 0
    assert run.main(out) == 0
    assert asked == ["llama", "llama searched", "gan"]
    lines = [json.loads(line) for line in (tmp_path / "zoo.jsonl").read_text().splitlines()]
    assert [each["key"] for each in lines] == [
        "transformers/llama/causal-lm",
        "plain/images/gan/custom",
    ]
    text = (tmp_path / "zoo.md").read_text()
    assert "1 of 2: 50.0%" in text
    assert "timm is left out" in text
    run.main([*out, "--again"])
    assert asked[3:] == ["gan"]
    run.main([*out, "--fresh", "--no-search", "--only", "causal-lm"])
    run.main([*out, "--only", "causal-lm"])  # what it lacks
    assert asked[4:] == ["llama", "llama searched"]
    assert "2 rows" in capsys.readouterr().out
