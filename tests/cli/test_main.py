"""The command line as a whole: how it starts, and how every command ends."""

import errno
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import autofit
import autofit.__main__ as program
from autofit.cli import main
from tests.cli.command import Run, assert_error


@pytest.mark.parametrize("where", ["models.describe_presets", "_Commands.parse_args"])
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "plain"])
def test_an_interrupt_before_anything_is_known(
    run: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool, where: str
) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"autofit.cli.{where}", press, raising=False)
    printed = run("models", *(["--json"] if as_json else []))
    assert printed.code == 130
    assert printed.err == "autofit: interrupted.\n"
    assert bool(printed.out) == as_json


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "plain"])
def test_an_interrupt_while_the_command_line_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def press(_: str) -> None:
        raise KeyboardInterrupt

    asked: list[tuple[int, object]] = []
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(signal, "signal", lambda *given: asked.append(given))
        patched.setattr(importlib, "import_module", press)
        program.main(["models", *(["--json"] if as_json else [])])
    assert ended.value.code == 130
    printed = capsys.readouterr()
    assert printed.err == "autofit: interrupted.\n"
    assert not as_json or json.loads(printed.out) == {
        "schema": 1,
        "error": {"message": "interrupted.", "remedy": ""},
    }
    assert as_json or not printed.out
    assert asked == [(signal.SIGINT, signal.SIG_IGN)]


def test_an_interrupt_after_all_is_said_changes_nothing() -> None:
    """While Python ends: what libraries do there would end with a traceback."""
    late = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    code = f"{late}; from autofit.__main__ import main; main(['--version'])"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        0,
        f"autofit {autofit.__version__}\n",
        "",
    )


def test_an_error_of_autofits_own_is_json_and_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.cli.models.describe_presets", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["models", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert "ZeroDivisionError: division by zero" in answer["error"]["message"]


@pytest.mark.parametrize("page", ["x" * 5000, "x y " * 2000])
def test_a_page_for_an_argument_is_not_repeated_whole(run: Run, page: str) -> None:
    for given in (
        ("doctor", f"--{page}"),
        ("train", page, "--data", "data", "--from-scratch"),
        (page,),
    ):
        printed = run(*given, *(["--json"] if given[0] == "doctor" else []))
        assert printed.code == 2
        assert len(printed.err) < 4200
        assert page[:100] in printed.err


_NO_FOLDER = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
FULL = [
    (MemoryError("std::bad_alloc"), 4, "this machine's memory is full. Free some"),
    (
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        4,
        "this machine's memory is full. Free some",
    ),
    (
        _NO_FOLDER,
        2,
        "temporary files cannot be written: No usable temporary directory found in ['/tmp']. Make room",
    ),
]


@pytest.mark.parametrize(("error", "code", "words"), FULL)
def test_a_machine_that_is_full_is_told(
    error: Exception, code: int, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise error

    monkeypatch.setattr("autofit.cli.models.describe_presets", full)
    printed = run("models")
    assert (printed.code, printed.out) == (code, "")
    assert printed.err.startswith(f"autofit: {words}")


def test_a_current_directory_that_is_gone_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_error(
        run("models", "--json"),
        "the current directory does not exist any more. Change to one that does.",
    )


def test_without_arguments_it_says_how_to_start(run: Run) -> None:
    printed = run()
    assert (printed.code, printed.out) == (2, "")
    commands = [
        line.split()[1:] for line in printed.err.splitlines() if line.startswith("  autofit ")
    ]
    assert [words[0] for words in commands] == ["search", "search", "estimate"]
    assert "autofit --help" in printed.err


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"autofit {autofit.__version__}\n", "")
    assert run("--version", "search").out == run("--version").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serch",), ["No such command 'serch'"]),
        (("search",), ["Missing option", "--model"]),
        (("models", "x"), ["x"]),
    ],
)
def test_bad_commands(run: Run, arguments: tuple[str, ...], words: list[str]) -> None:
    assert_error(run(*arguments, "--json"), *words)
