"""`autofit report`: what it writes, what it prints, and what it says when it cannot."""

import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.core.record import Record, _digest
from autofit.report import run_report
from autofit.report.explain import explain
from autofit.report.run_report import report
from tests.mutations import mutations

Records = Callable[..., Record]


@pytest.fixture
def run(record: Records, tmp_path: Path) -> Path:
    return saved(record(), tmp_path / "run-a")


def saved(record: Record, folder: Path) -> Path:
    folder.mkdir()
    (folder / "result.json").write_text(record.to_text())
    return folder


def test_the_page_is_written_again(run: Path) -> None:
    assert report([run], None, None) == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    elsewhere = run / "other.html"
    assert report([run], "html", elsewhere) == str(elsewhere)
    assert elsewhere.exists()


def test_a_function_that_a_record_names_is_not_run(
    record: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    held = record()
    source = {"kind": "function", "function": "evil.py:f"}
    run = saved(
        dataclasses.replace(held, result=dataclasses.replace(held.result, source=source)),
        tmp_path / "run",
    )
    for form in ("html", "md", "svg"):
        assert report([run], form, None)
    assert not (tmp_path / "ran").exists()


def test_pictures_are_documents_of_their_own(run: Path) -> None:
    told = report([run], "svg", None)
    assert isinstance(told, str)
    paths = [Path(line) for line in told.splitlines()]
    assert {path.parent for path in paths} == {run / "pictures"}
    assert "memory-timeline-full.svg" in {path.name for path in paths}
    for path in paths:
        root = ElementTree.fromstring(path.read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in path.read_text()  # which converters do not know


def test_markdown_is_printed_or_written(run: Path) -> None:
    told = report([run], "md", None)
    assert isinstance(told, str)
    assert told.startswith("### tiny-llama on a test's CPU within 2.00 GiB")
    assert report([run], "md", run / "a.md") == str(run / "a.md")
    assert (run / "a.md").read_text() == told + "\n"


def test_two_runs_are_compared(record: Records, run: Path, shown: Callable[..., str]) -> None:
    other = saved(record(search_seconds=5.0), run.parent / "run-b")
    text = shown(report([run, other], None, None))
    assert "run-a" in text
    assert "run-b" in text
    told = report([run, other], "md", None)
    assert isinstance(told, str)
    assert "| search, seconds | 83 | 5 |" in told
    with pytest.raises(InputError, match="compared as a table or as Markdown, not as svg"):
        report([run, other], "svg", None)
    with pytest.raises(InputError, match="3 runs were given"):
        report([run, other, run], None, None)


def test_what_is_wrong_is_told_in_a_sentence(record: Records, run: Path) -> None:
    empty = run.parent / "empty"
    empty.mkdir()
    nothing = saved(
        record(best=None, tiers={}, trials=(), runner_up=None, frontier={}, alternatives=()),
        run.parent / "n",
    )
    for told, message in (
        (((run,), "pdf", None), "unknown format 'pdf'"),
        (((run.parent / "nowhere",), None, None), "nowhere is not there"),
        (((run / "result.json",), None, None), "is a file, not a run directory"),
        (((empty,), None, None), r"holds no result\.json"),
        (((nothing,), "svg", None), "there is nothing to draw"),
        (((run,), "svg", run / "result.json"), "is a file; there are"),
        (((run,), "html", run / "a" / "b.html"), r"a/b\.html cannot be written"),
        (((run,), "html", Path()), r"\. cannot be written: Is a directory"),
    ):
        arguments: Any = told
        with pytest.raises(InputError, match=message):
            report(*arguments)


@pytest.mark.parametrize(
    "changed", [{"versions": None}, {"skipped": None}, {"options": []}, {"bound": "much"}]
)
def test_a_record_changed_by_hand_is_told_in_a_sentence(run: Path, changed: dict[str, Any]) -> None:
    path = run / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(InputError, match=r"result\.json(| is damaged): \w+Error"):
        report([run], "html", None)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), form=st.sampled_from(["html", "md"]))
def test_whatever_was_changed_it_is_reported_on_or_refused(
    run: Path, data: st.DataObject, form: str
) -> None:
    path = run / "result.json"
    whole = path.read_text()
    path.write_text(json.dumps(data.draw(mutations(json.loads(whole)))))
    try:
        report([run], form, run / "out")
    except InputError as error:
        assert "result.json" in error.message
    finally:
        path.write_text(whole)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_result_of_wrong_types_is_refused_before_it_is_explained(
    run: Path, data: st.DataObject
) -> None:
    path = run / "result.json"
    whole = path.read_text()
    path.write_text(json.dumps(data.draw(mutations(json.loads(whole), leave="config"))))
    try:
        assert explain(Record.load(path).result)
    except InputError as error:
        assert error.message
    finally:
        path.write_text(whole)


def signed(data: dict[str, Any]) -> str:
    """The text of a record as a search writes it, whatever it holds."""
    data.pop("digest", None)
    return json.dumps({**data, "digest": _digest(data)})


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_right_digest_makes_no_record_right(run: Path, data: st.DataObject) -> None:
    path = run / "result.json"
    whole = path.read_text()
    path.write_text(signed(data.draw(mutations(json.loads(whole)))))
    try:
        report([run], "md", run / "out")
    except InputError as error:
        assert "result.json" in error.message
    finally:
        path.write_text(whole)


@pytest.mark.parametrize("form", ["html", "md", "svg"])
def test_a_report_tells_of_knobs_that_this_autofit_does_not_have(run: Path, form: str) -> None:
    """They may be of a technique that somebody registered, or of a later autofit."""
    path = run / "result.json"
    data = json.loads(path.read_text())
    for config in configs_in(data):
        config["warp_speed"] = "nine"
        del config["optimizer"]
    path.write_text(signed(data))
    assert report([run], form, None)
    assert explain(Record.load(path).result)


def configs_in(data: Any) -> Iterator[dict[str, Any]]:
    for key, value in (
        data.items()
        if isinstance(data, dict)
        else enumerate(data if isinstance(data, list) else ())
    ):
        if key == "config":
            yield value
        else:
            yield from configs_in(value)


def test_what_cannot_be_drawn_is_told_with_its_line(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any) -> str:
        raise KeyError("of ours")

    monkeypatch.setattr("autofit.report.run_report.report_page", mistaken)
    with pytest.raises(
        InputError, match=r"result\.json: KeyError: 'of ours', in line \d+ of test_run_report\.py"
    ):
        report([run], "html", None)


def test_without_a_converter_there_are_no_png(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report.shutil, "which", lambda name: None)
    monkeypatch.setattr(run_report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="neither cairosvg nor rsvg-convert"):
        report([run], "png", None)


def test_a_converter_is_called_for_each_picture(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def convert(command: list[str], **given: Any) -> subprocess.CompletedProcess[bytes]:
        assert b"<svg" in given["input"]
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, b"\x89PNG", b"")

    monkeypatch.setattr(run_report.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(run_report.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(run_report.subprocess, "run", convert)
    (run / "shots").mkdir()
    svgs = report([run], "svg", None)
    assert isinstance(svgs, str)
    link = run / "shots" / f"{Path(svgs.splitlines()[0]).stem}.png"
    link.symlink_to(run / "elsewhere.png")
    told = report([run], "png", run / "shots")
    assert isinstance(told, str)
    assert link.is_symlink()
    assert (run / "elsewhere.png").read_bytes() == b"\x89PNG"
    assert len(commands) == len(told.splitlines()) == len(list((run / "shots").glob("*.png")))
    assert run_report.FORMATS == ("html", "svg", "png", "md")
