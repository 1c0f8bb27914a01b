"""A result for a pull request: short, and nothing in it is taken for markup."""

import dataclasses
from collections.abc import Callable

from autofit.core.record import Record
from autofit.report.markdown import markdown, table

Records = Callable[..., Record]


def test_the_answer_comes_first(record: Records) -> None:
    told = markdown(record())
    lines = told.splitlines()
    assert lines[0] == "### tiny-llama on a test's CPU within 2.00 GiB"
    assert lines[2].startswith(
        "**6,400 tokens/s**, 1.50 of 2.00 GiB at the peak, 0.08 s a step (0.0784 to 0.0824), verified"
    )
    assert "precision: bf16-mixed" in lines
    assert "- twice as much" not in told
    assert "**With other budgets**" in lines
    assert lines[-1] == "Versions: autofit 0.1.0, torch 2.13.0."
    assert told.endswith("\n")


def test_the_table_is_one(record: Records) -> None:
    rows = [line for line in markdown(record()).splitlines() if line.startswith("|")]
    assert len(rows) > 5
    assert {row.count(" | ") for row in rows} == {3}


def test_nothing_in_it_is_markup(record: Records) -> None:
    trials = tuple(
        dataclasses.replace(each, reason="a | b\n<b>c</b>") for each in record().result.trials
    )
    told = markdown(record(model="<img src=x> *a*_b_|", trials=trials, notes=("see `this`",)))
    assert "\\<img src=x\\> \\*a\\*\\_b\\_\\|" in told
    assert "see \\`this\\`" in told
    assert "<b>" not in told


def test_nothing_fits(record: Records) -> None:
    told = markdown(record(best=None, tiers={}, runner_up=None, alternatives=()))
    assert "Nothing fits: tiny-llama" in told
    assert "What would help:" in told


def test_a_table() -> None:
    assert table(("x", "y"), [("1", "2")]) == "| x | y |\n| --- | ---: |\n| 1 | 2 |"
