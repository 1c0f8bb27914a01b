"""Also of the recorder, which pytest runs as a plugin: what is stored is what a real pytest did."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import correct, recorder
from benchmarks.gpu.bench import Bench, TimeUp
from tests.benchmarks.gpu.rows import bench_in
from tests.processes import wait_until

TESTS = """
import os, signal, time
import pytest

pytestmark = pytest.mark.gpu
SEEN = {seen!r}

def note(name):
    with open(SEEN, "a") as file:
        file.write(name + " ")

def test_good():
    note("good")

def test_bad():
    note("bad")
    assert not "bad"

@pytest.mark.skip(reason="needs a CUDA device")
def test_skipped():
    pass

def test_last():
    note("last")
    {last}
"""
NAMES = ("good", "bad", "skipped", "last")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(correct, "marked_files", lambda _: [str(tmp_path / "test_them.py")])
    monkeypatch.setattr(Bench, "left", property(lambda bench: bench.deadline))
    bench = bench_in(tmp_path / "out")
    bench.deadline = 60.0
    return bench


def write(bench: Bench, last: str = "pass") -> Path:
    folder = bench.store.path.parents[1]
    seen = folder / "seen"
    (folder / "test_them.py").write_text(TESTS.format(seen=str(seen), last=last))
    seen.write_text("")
    return seen


def outcomes(bench: Bench) -> dict[str, str]:
    rows = {
        key.rpartition("test_")[2]: row["outcome"]
        for key, row in bench.store.rows(recorder.STAGE).items()
    }
    return {name: rows[name] for name in NAMES if name in rows}


def test_each_is_stored_and_only_what_failed_is_run_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = write(bench)
    correct.run(bench)
    assert outcomes(bench) == {
        "good": "passed",
        "bad": "failed",
        "skipped": "skipped",
        "last": "passed",
    }
    summary = correct.summarize(bench.store)
    assert summary.figures == {"passed": 2, "failed": 1, "skipped": 1}
    assert summary.tables[0].rows[0][0].endswith("::test_bad")
    assert "assert not" in str(summary.tables[0].rows[0][1])
    assert summary.notes == ["1 skipped: needs a CUDA device"]
    monkeypatch.setattr(correct.os, "getpid", lambda: 1)  # another call
    correct.run(bench)
    assert seen.read_text().split() == ["good", "bad", "last", "bad"]


def test_a_test_that_kills_its_process_has_failed_and_the_others_are_known(bench: Bench) -> None:
    write(bench, "os.kill(os.getpid(), signal.SIGKILL)")
    correct.run(bench)
    assert outcomes(bench)["last"] == "failed"
    assert outcomes(bench)["good"] == "passed"
    last = [
        row
        for row in bench.store.rows(recorder.STAGE).values()
        if "died" in (row.get("failed") or "")
    ]
    assert [row["failed"] for row in last] == ["its process died: signal 9"]


def test_an_error_of_cuda_ends_its_process_and_the_rest_is_run_in_another(bench: Bench) -> None:
    seen = write(bench, "raise RuntimeError('CUDA error: device-side assert triggered')")
    text = (path := bench.store.path.parents[1] / "test_them.py").read_text()
    path.write_text(f"{text}\ndef test_after():\n    note('after ' + str(os.getpid()))\n")
    correct.run(bench)
    noted = seen.read_text().split()
    assert noted[:4] == ["good", "bad", "last", "after"]
    assert outcomes(bench)["last"] == "failed"
    assert len(noted) == 5


def test_what_hangs_is_run_last_the_next_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = write(bench, "time.sleep(0 if 'hung' in open(SEEN).read() else 600)")

    class UpOnceItHangs(subprocess.Popen[str]):
        def communicate(self, _: object = None, timeout: float | None = None) -> Any:
            assert timeout == bench.deadline
            wait_until(lambda: "last" in seen.read_text(), "the last test is begun")
            raise subprocess.TimeoutExpired("pytest", timeout)

    with monkeypatch.context() as patch, pytest.raises(TimeUp):
        patch.setattr(subprocess, "Popen", UpOnceItHangs)
        correct.run(bench)
    assert outcomes(bench)["last"] == "begun"
    assert correct.summarize(bench.store).notes[0].endswith("test_last did not end in its time.")
    seen.write_text("hung ")
    monkeypatch.setattr(correct.os, "getpid", lambda: 1)
    correct.run(bench)
    assert seen.read_text().split() == ["hung", "bad", "last"]
    assert outcomes(bench)["last"] == "passed"


def test_files_are_those_with_the_mark(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_a.py").write_text("pytestmark = pytest.mark.gpu")
    (tmp_path / "test_b.py").write_text("")
    assert correct.marked_files(tmp_path) == [str(tmp_path / "deep" / "test_a.py")]
