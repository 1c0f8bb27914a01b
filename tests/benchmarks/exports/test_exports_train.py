"""What makes an export wrong, and that a row reads as it was written."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.export_runs import Taken
from benchmarks.exports_train import RESULTS, Row, read, table, told, write
from benchmarks.tool_runs import RUNS

OURS = Taken((8.0, 7.5, 7.0), 1000, 400, "AdamW")
ROW = Row("transformers", "5.23.0", "fp32", 1, (), OURS, OURS)
MORE = "loss chunked: Trainer holds the logits of all tokens. It may no longer fit."
LESS = "activation_checkpointing selective: Trainer checkpoints blocks whole, with less memory than measured."


@pytest.mark.parametrize(
    ("changed", "said", "wrong"),
    [
        ({}, (), None),
        ({"peak_bytes": 1049}, (), None),
        ({"peak_bytes": 1060}, (), "memory +6.0%"),
        ({"peak_bytes": 1060}, (LESS,), "memory +6.0%"),
        ({"peak_bytes": 1060}, (MORE,), None),
        ({"peak_bytes": 700}, (MORE,), "memory -30.0%"),
        ({"peak_bytes": 700}, (LESS,), None),
        ({"state_bytes": 300}, (), "state -10.0%"),
        ({"losses": (8.0, 7.5, 7.1)}, (), "loss +1.4%"),
        ({"losses": (8.0, 7.5, 7.1)}, (MORE, LESS), "loss +1.4%"),
        (
            {"losses": (8.0, 7.5, 7.1)},
            ("optimizer adamw-fp8: torchao's 8-bit AdamW takes its place.",),
            None,
        ),
        ({"losses": (8.0, 8.0, 8.0)}, (), "its loss does not fall: (8.0, 8.0, 8.0)"),
    ],
)
def test_what_is_neither_as_measured_nor_announced_is_wrong(
    changed: dict[str, object], said: tuple[str, ...], wrong: str | None
) -> None:
    assert replace(ROW, theirs=replace(OURS, **changed), announced=said).wrong == wrong


def test_what_does_not_train_is_wrong() -> None:
    assert told(replace(ROW, theirs=None, failed="an error")) == (
        "transformers fp32: WRONG, it does not train: an error"
    )


def test_a_row_reads_as_it_was_written(tmp_path: Path) -> None:
    found = [
        replace(ROW, announced=(LESS,)),
        replace(ROW, case="sgd", theirs=None, failed="an error"),
    ]
    write(tmp_path / "rows.json", found)
    assert read(tmp_path / "rows.json") == found


def test_the_docs_tell_what_was_found() -> None:
    rows = read(RESULTS)
    docs = (RESULTS.parents[2] / "docs" / "exports.md").read_text(encoding="utf-8").splitlines()
    lines = table(rows)
    assert len(lines) == len(RUNS)
    assert [line for line in lines if line not in docs] == []
    assert [told(row) for row in rows if row.wrong] == []
