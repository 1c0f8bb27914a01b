from pathlib import Path

from benchmarks.gpu.markdown import document, shown, table
from benchmarks.gpu.stage import Summary, Table
from benchmarks.gpu.wanted import Verdict
from tests.benchmarks.gpu.rows import bench_in


def test_a_cell_breaks_no_table() -> None:
    text = table(Table("Title", ("a", "b"), [("one | two\nthree", None)]))
    assert text.splitlines() == [
        "## Title",
        "",
        "| a | b |",
        "| --- | --- |",
        "| one \\| two three | - |",
    ]


def test_figures_have_the_digits_they_are_good_for() -> None:
    assert [shown(each) for each in (12345.678, 0.123456, 7, None, "3 of 4")] == [
        "12,346",
        "0.1235",
        "7",
        "-",
        "3 of 4",
    ]


def test_the_document_says_what_was_reached_and_what_became_of_each_stage(tmp_path: Path) -> None:
    about = bench_in(tmp_path, smoke=False).store.get("about")
    assert about
    numbers = [
        Verdict("a", "at most 2", "1", True),
        Verdict("b", "at most 2", "3", False),
        Verdict("c", "x", None, None),
    ]
    failed = {"stage": "memory", "outcome": "failed", "reason": "no | card", "seconds": 1.6}
    told = Summary({"configs": 3}, [Table("Memory", ("x",), [["1"]])], ["one\nnote"])
    lines = document(about, numbers, [(failed, told)]).splitlines()
    assert "| a | at most 2 | 1 | yes |" in lines
    assert "| b | at most 2 | 3 | **no** |" in lines
    assert "| c | x | - | not measured |" in lines
    assert "| memory | failed: no \\| card | 2 | configs 3 |" in lines
    assert "## Memory" in lines
    assert "- one note" in lines


def test_a_rehearsal_judges_nothing(tmp_path: Path) -> None:
    about = bench_in(tmp_path).store.get("about")
    assert about
    text = document(about, [Verdict("a", "at most 2", "1", True)], [])
    assert "Rehearsal" in text
    assert "| a | at most 2 | 1 | - |" in text
