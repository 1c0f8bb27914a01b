"""A run directory belongs to one process at a time, is never overwritten, and is free again if nothing came of it."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autofit.core import run_directory
from autofit.core.errors import InputError
from autofit.core.files import write_atomically
from autofit.core.run_directory import RunDirectory, free_run_directory

HOLDER = """
import sys
from pathlib import Path
from autofit.core.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1]), resume=len(sys.argv) > 2):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path, *resume: str) -> Iterator[subprocess.Popen]:
    """Another process that holds the directory."""
    command = [sys.executable, "-c", HOLDER, str(path), *resume]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def with_a_search(path: Path) -> Path:
    path.mkdir()
    (path / "journal.log").write_text("measurements")
    return path


def test_a_new_one_is_made_with_all_its_parents(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "a" / "b") as run:
        assert run.probes.is_dir()
        names = [run.result.name, run.script.name, run.report.name, run.journal.name]
        assert names == ["result.yaml", "train.py", "report.html", "journal.log"]
        assert {each.parent for each in (run.result, run.script, run.report, run.journal)} == {
            tmp_path / "a" / "b"
        }


def test_a_relative_one_stays_where_it_is_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("x"))
    assert run.path == tmp_path / "x"


def test_a_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with (
        held_elsewhere(path),
        pytest.raises(InputError, match="is in use by another autofit process"),
    ):
        RunDirectory(path).__enter__()


def test_also_when_resuming(tmp_path: Path) -> None:
    path = with_a_search(tmp_path / "run")
    with held_elsewhere(path, "resume"), pytest.raises(InputError, match="Wait for it to end"):
        RunDirectory(path, resume=True).__enter__()


def test_where_another_has_it_the_next_free_one_is_taken(tmp_path: Path) -> None:
    """As two searches of one model do that are started in the same second."""
    path = tmp_path / "runs" / "model"
    with (
        held_elsewhere(path),
        free_run_directory(path) as second,
        free_run_directory(path) as third,
    ):
        assert (second.path.name, third.path.name) == ("model-2", "model-3")
        second.journal.touch()
    with free_run_directory(path) as first, free_run_directory(path) as fourth:
        # the second holds a search
        assert (first.path.name, fourth.path.name) == ("model", "model-3")
    with pytest.raises(ZeroDivisionError), free_run_directory(tmp_path / "new"):
        1 / 0  # noqa: B018
    assert not (tmp_path / "new").exists()
    with (
        pytest.raises(InputError, match="is a file, not a directory"),
        free_run_directory(Path(__file__)),
    ):
        pass


def test_a_process_that_dies_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with held_elsewhere(path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with RunDirectory(path):  # it measured nothing, so there is nothing to resume
            pass


def test_leaving_lets_go_also_after_an_error(tmp_path: Path) -> None:
    path = with_a_search(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), RunDirectory(path, resume=True):
        1 / 0  # noqa: B018
    with RunDirectory(path, resume=True):
        pass


def test_a_search_is_continued_only_when_asked(tmp_path: Path) -> None:
    path = with_a_search(tmp_path / "run")
    with pytest.raises(InputError, match=r"already holds a search\. Add --resume to continue it"):
        RunDirectory(path).__enter__()
    with RunDirectory(path, resume=True) as run:
        assert run.journal.read_text() == "measurements"


@pytest.mark.parametrize("name", ["notes.txt", "probes"])
def test_other_files_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=r"already holds other files\. Choose another --out\."):
        RunDirectory(tmp_path).__enter__()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_run_that_was_killed_before_its_first_measurement_can_be_resumed(tmp_path: Path) -> None:
    for resume in (False, True):
        with RunDirectory(tmp_path / "run", resume=resume):
            pass
    (tmp_path / "run" / "mine.txt").touch()
    with pytest.raises(InputError, match="already holds other files"):
        RunDirectory(tmp_path / "run", resume=True).__enter__()


def killed_at(moment: int, path: Path) -> int:
    """How a process ended that was killed at the first, second ... file that it asked the system for while it made a
    run directory."""
    process = os.fork()
    if process == 0:
        asked = itertools.count()

        def strike(event: str, given: tuple[object, ...]) -> None:
            if (
                event in ("open", "os.mkdir")
                and str(given[0]).startswith(str(path))
                and next(asked) == moment
            ):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(strike)
        RunDirectory(path).__enter__()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_run_that_is_killed_while_it_makes_its_directory_is_not_in_the_way_of_another(
    tmp_path: Path,
) -> None:
    ends = [killed_at(moment, tmp_path / str(moment)) for moment in range(6)]
    assert ends[:3] == [-signal.SIGKILL] * 3  # the directory, its lock, its probes
    assert ends[-1] == 0
    for moment in range(6):
        with RunDirectory(tmp_path / str(moment)):
            pass


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no search to resume"):
        RunDirectory(tmp_path / "none", resume=True).__enter__()
    assert not (tmp_path / "none").exists()


def test_a_file_in_its_place_or_on_its_way(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="is a file, not a directory"):
        RunDirectory(file).__enter__()
    with pytest.raises(InputError, match="file is a file, not a directory"):
        RunDirectory(file / "run").__enter__()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_journal_or_a_lock_that_is_no_file_is_not_opened(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    for name, message in (
        ("journal.log", "journal.log is no regular file"),
        (".lock", "run cannot be written"),
    ):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        make(run / name)
        with pytest.raises(InputError, match=message):
            RunDirectory(run, resume=name != ".lock").__enter__()
        assert [each.name for each in run.iterdir()] == [name]


def fail(path: Path, *lines: bytes) -> None:
    """A search that fails after it has written a journal of these lines."""
    with contextlib.suppress(ZeroDivisionError), RunDirectory(path) as run:
        (run.probes / "0000.log").write_text("look")
        run.lines.extend(lines)
        run.journal.write_bytes(b"".join(lines))
        1 / 0  # noqa: B018


MEASURED = b'{"op_code":8,"user_attr":{"measurement":{}}}\n'


@pytest.mark.parametrize("there", [".", "runs", "runs/new"])
def test_a_search_that_measured_nothing_leaves_what_was_there_before(
    tmp_path: Path, there: str
) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = list(tmp_path.rglob("*"))
    for _ in range(2):  # the same --out again
        fail(tmp_path / "runs" / "new", b'{"op_code":0}\n')
        assert list(tmp_path.rglob("*")) == before


def test_also_where_it_could_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_directory, "locked", locked)
    with (
        pytest.raises(InputError, match="cannot be written: No locks available"),
        RunDirectory(tmp_path / "a" / "b"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_search_that_measured_something_keeps_all(tmp_path: Path) -> None:
    fail(tmp_path / "run", MEASURED)
    assert (tmp_path / "run" / "journal.log").read_bytes() == MEASURED
    assert (tmp_path / "run" / "probes" / "0000.log").read_text() == "look"


def test_what_was_there_before_or_somebody_else_put_there_stays(tmp_path: Path) -> None:
    resumed, path = with_a_search(tmp_path / "old"), tmp_path / "run"
    with contextlib.suppress(ZeroDivisionError), RunDirectory(resumed, resume=True):
        1 / 0  # noqa: B018
    assert (resumed / "journal.log").read_text() == "measurements"
    with contextlib.suppress(ZeroDivisionError), RunDirectory(path):
        (path / "mine.txt").write_text("mine")
        1 / 0  # noqa: B018
    assert [each.name for each in path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("deleted", ["run", "run/probes", "run/journal.log", "run/.lock"])
def test_what_is_deleted_meanwhile_is_made_again(tmp_path: Path, deleted: str) -> None:
    with RunDirectory(tmp_path / "run") as run:
        assert not run.restored()
        run.lines.append(MEASURED)
        run.journal.write_bytes(MEASURED)
        assert not run.restored()
        gone = tmp_path / deleted
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        assert run.restored()
        assert run.journal.read_bytes() == MEASURED
        assert run.probes.is_dir()
        assert not run.restored()
        with pytest.raises(InputError, match="in use by another"):
            RunDirectory(tmp_path / "run", resume=True).__enter__()


def test_measurements_outlive_a_directory_that_is_deleted_as_the_search_ends(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    with RunDirectory(tmp_path / "run") as run:
        run.notify = told.append
        run.lines.append(MEASURED)
        run.journal.write_bytes(MEASURED)
        shutil.rmtree(tmp_path / "run")
    assert run.journal.read_bytes() == MEASURED
    (note,) = told
    assert "was deleted during the search: it is made again" in note


def test_one_that_is_moved_stays_where_it_is_now(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        (tmp_path / "run").rename(tmp_path / "mine")
        assert run.restored()
    assert (tmp_path / "mine" / "probes").is_dir()
    assert (tmp_path / "run" / "probes").is_dir()


def test_where_another_search_has_taken_its_place_the_journal_is_told_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "run"
    with RunDirectory(path) as run:
        run.lines.append(MEASURED)
        run.journal.write_bytes(MEASURED)
        shutil.rmtree(path)
        with held_elsewhere(path):
            for _ in range(2):  # as every later record does, until the search has ended
                with pytest.raises(
                    InputError, match=r"run was deleted during the search .* is in use"
                ) as caught:
                    run.restored()
                run.lines.append(MEASURED)
        assert list(path.iterdir()) == [path / ".lock", path / "probes"]
        other = with_a_search(tmp_path / "other")
        shutil.rmtree(path)
        other.rename(path)
        with pytest.raises(InputError, match="another search was there meanwhile"):
            run.restored()
    (elsewhere,) = tmp_path.glob("autofit-*")
    assert f"continue with --resume --out {elsewhere}." in str(caught.value)
    assert (path / "journal.log").read_text() == "measurements"
    with RunDirectory(elsewhere, resume=True) as run:
        assert run.journal.read_bytes() == MEASURED * 3


def test_a_file_that_cannot_be_written_is_an_error_that_says_how_to_continue(
    tmp_path: Path,
) -> None:
    path = with_a_search(tmp_path / "run")
    (path / "result.yaml").mkdir()
    message = (
        r"run/result\.yaml cannot be written: Is a directory\. "
        r"All measurements are safe: .* --resume --out .*run\."
    )
    with pytest.raises(InputError, match=message), RunDirectory(path, resume=True) as run:
        write_atomically(run.result, "text")
    with (
        pytest.raises(InputError, match=r"Choose another --out"),
        RunDirectory(tmp_path / "new") as run,
    ):
        write_atomically(run.path / "gone" / "x", "text")
    # not of this directory
    with pytest.raises(FileNotFoundError), RunDirectory(tmp_path / "new") as run:
        (tmp_path / "elsewhere").read_text()
