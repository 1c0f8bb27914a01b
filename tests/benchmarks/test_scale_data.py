"""The files that `benchmarks.scale` makes are of the kinds and sizes that it says."""

from pathlib import Path

import pytest

from autofit.core.tasks import TASKS
from autofit.data.rows import read_rows
from benchmarks.scale.data import _MODELS, write_rows


@pytest.mark.parametrize(
    ("kind", "form"),
    [("texts", ("text",)), ("chats", ("messages",)), ("pairs", ("source", "target"))],
)
def test_files_of_every_kind(tmp_path: Path, kind: str, form: tuple[str, ...]) -> None:
    path = tmp_path / "a.jsonl"
    rows = write_rows(path, kind, 200_000)
    assert 200_000 <= path.stat().st_size < 400_000
    found = read_rows(path, TASKS[_MODELS[kind][1]].rows)
    assert found.form == form
    assert len(found.locations) == rows
