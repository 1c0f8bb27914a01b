"""`autofit spaces`."""

from pathlib import Path

from tests.cli.command import Run


def test_spaces(run: Run) -> None:
    rows = run("spaces", "--json").json["spaces"]
    assert [row["name"] for row in rows] == ["everything", "exact", "full", "lora", "qlora"]
    assert all(row["configs"] > 0 for row in rows)
    assert all(row["description"] and Path(row["path"]).is_file() for row in rows)
