"""`autofit report`: the page of a search drawn again, its pictures, and comparisons."""

from pathlib import Path

import pytest

import autofit
from autofit.core.record import Record
from tests.cli.command import Output, Run


def test_the_report_of_a_search(here: Path, searched: Output, run: Run) -> None:
    """Drawn again from the record; the step shown is as large as the one that was measured."""
    record = Record.load(here / "run" / "result.json")
    line, measured = record.timelines["full"], record.result.tiers["full"]
    assert measured
    assert measured.peak_bytes
    assert line.peak_bytes == pytest.approx(measured.peak_bytes.allocated, rel=0.01)
    assert Path(searched.json["files"]["report"]).parts[-2:] == ("run", "report.html")
    page = here / "run" / "report.html"
    drawn = page.read_text()
    assert "Where the memory goes" in drawn
    page.unlink()
    assert run("report", "run").out == f"{page}\n"
    assert page.read_text() == drawn
    assert run("report", "run", "--format", "md").out.startswith("### llama on ")
    assert "Both chose the same config." in run("report", "run", "run").out
    pictures = run("report", "run", "--format", "svg", "--output", "drawn").out.splitlines()
    assert Path("drawn/memory-timeline-full.svg") in map(Path, pictures)
    for command in ("report", "explain"):
        nowhere = run(command, "nowhere")
        assert nowhere.code == 2
        assert (
            nowhere.err
            == "autofit: nowhere is not there. Give the directory of a search, such as autofit-runs/NAME.\n"
        )


@pytest.mark.usefixtures("here", "searched")
def test_an_answer_is_explained_as_in_python(run: Run) -> None:
    assert run("explain", "run").out == f"{autofit.explain('run')}\n"
