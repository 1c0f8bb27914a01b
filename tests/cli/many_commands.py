"""Runs many commands in one process that has no torch, up to where one would import it: a script for tests.

Lists of arguments come as JSON on stdin; for each a line says the exit code ("reached": the command would now import
torch), what was printed to stdout and to stderr, and whether torch was imported all the same.
"""

import contextlib
import importlib
import io
import json
import sys
import traceback
from typing import Any
from unittest import mock

from autofit.cli import main
from autofit.cli.output import heavy

LIGHT = ("autofit.report", "autofit.search.space")
ROOMS = [
    f"autofit.cli.{name}"
    for name in ("completion", "doctor", "estimate", "export", "report", "search", "train")
]


class ReachedError(BaseException):
    """A command has found nothing wrong and goes on to what takes seconds."""


def stop(*_: object, **__: object) -> None:
    raise ReachedError


def light(module: str, name: str) -> Any:
    return heavy(module, name) if module.startswith(LIGHT) else stop


def run(arguments: list[str]) -> tuple[object, str, str, bool]:
    out, err = io.StringIO(), io.StringIO()
    code: object = "returned"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
        except ReachedError:
            code = "reached"
        except BaseException:
            code = traceback.format_exc()
    return code, out.getvalue(), err.getvalue(), "torch" in sys.modules


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        for room in [*ROOMS, "autofit.cli.spaces"]:
            stack.enter_context(mock.patch.object(importlib.import_module(room), "heavy", light))
        for given in json.load(sys.stdin):
            sys.stdout.write(f"{json.dumps(run(given))}\n")
