"""Where stdout or stderr is full, closed or takes ASCII only, a command ends with a sentence and its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import RESULT

# Every command in a child of one process that has imported autofit; what would load torch answers at once.
CODE = """
import importlib, os, sys
from types import SimpleNamespace
from autofit.cli import main
from autofit.cli.output import heavy
from autofit.core.events import Note

answer = {"schema": 1, "spaces": [], "counted_for": "\\u00e9", "cards": [], "notes": ["\\udcff"], "model": "m"}
answer["config"], answer["configs"], answer["workload"] = {}, [], {"sequence_length": 1, "effective_batch_size": 1}
result = SimpleNamespace(to_json=lambda: answer, predicted_best=None, best=1, config={}, was_interrupted=False)
result.run_directory = None
exported = SimpleNamespace(text="\\u00e9\\udcff\\n", message="", to_json=lambda: answer)
answers = {"autofit.api.spaces": answer, "autofit.api.search": result, "autofit.export.from_result": exported}
answers |= {"autofit.api.what_if": answer, "autofit.report.run_report": "\\u00e9\\n"}

answers["autofit.api.train"] = SimpleNamespace(history=[SimpleNamespace(step=1, loss=1.0)], evaluations=[])

def light(module, name):
    def fake(*_, listener=lambda _: None, callbacks=(), **__):
        listener(Note("told while it runs"))
        for each in callbacks:
            each(answers[module].history[0])
        return answers[module]

    return heavy(module, name) if module.startswith("autofit.search") else fake

for room in ("estimate", "export", "report", "search", "spaces", "train"):
    importlib.import_module(f"autofit.cli.{room}").heavy = light
commands = [line.split() for line in sys.stdin.read().splitlines()]
for command in commands:
    child = os.fork()
    if not child:
        main(command)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(3, f"{code} ".encode())
"""
COMMANDS = """\
models --json
models x --json
export --to list
export result.yaml --to trl
export result.yaml --to tlr --json
report run
search --model tiny-llama --device cpu --json
train result.yaml --data result.yaml --from-scratch
estimate --model tiny-llama --gpu list --json
spaces
spaces --json
search --help
--version
"""
CODES = ["2" if "models x" in line or "tlr" in line else "0" for line in COMMANDS.splitlines()]


def codes_of(folder: Path, redirected: str, **environment: str) -> tuple[list[str], str]:
    """The exit codes of the commands with stdout or stderr redirected by the shell, and what stands in stderr."""
    (folder / "result.yaml").write_text(RESULT)
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" 3>codes {redirected}', sys.executable, CODE],
        input=COMMANDS,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "", "COLUMNS": "200", **environment},
        check=True,
        timeout=120,
    )
    return (folder / "codes").read_text().split(), done.stderr


@pytest.mark.parametrize(
    ("redirected", "reason"),
    [(">/dev/full", "No space left on device"), (">&-", "it is closed")],
    ids=str,
)
def test_stdout_that_takes_nothing_is_told(tmp_path: Path, redirected: str, reason: str) -> None:
    codes, err = codes_of(tmp_path, redirected)
    assert codes == ["2"] * len(CODES)
    told = f"autofit: the answer cannot be printed: {reason}. Give stdout somewhere to go."
    lines = [line for line in err.splitlines() if line != told]
    assert err.count(told) == len(CODES)
    told = (
        "told while it runs"  # and what says that, or is an error that could not be printed as JSON
    )
    assert all(line.startswith(("autofit: ", told, "step 1 of ")) for line in lines), lines


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-", "2> >(exec <&-)"])
def test_stderr_that_takes_nothing_changes_no_exit_code(tmp_path: Path, redirected: str) -> None:
    assert codes_of(tmp_path, redirected) == (CODES, "")


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "C"],
)
def test_any_character_is_printed_in_any_encoding(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    codes, err = codes_of(tmp_path, "", **environment)
    assert codes == CODES
    assert "Traceback" not in err
