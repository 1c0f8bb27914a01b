"""What commands print, and how they reach heavy rooms."""

import errno
import gc
import importlib
import io
import json
import os
import re
import sys
from typing import Any

from autofit.report.terminal import Terminal

INTERRUPTED = 130  # the exit code
_LONG_WORD, _MOST_TOLD = re.compile(r"(\S{400})\S+"), 2000  # characters of an error; most paths are shorter


class _Stderr(io.FileIO):
    """What it cannot print, on a full disk or to a reader that has gone, ends no search and no training."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            drop_rest(self.fileno())
            return len(data)


def open_streams() -> None:
    """Make stdout and stderr print any character. One that was closed must not be the first file that is opened: stderr
    goes nowhere, and stdout is an OSError, before a command works for nothing."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        pass
    os.close(number)
    if sys.stderr is None:
        sys.stderr = io.StringIO()
    elif (stream := sys.__stderr__) is not None and stream is sys.stderr:
        raw = io.BufferedWriter(_Stderr(stream.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
    if sys.stdout is None:
        raise OSError(errno.EBADF, "it is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it


def drop_rest(stream: int) -> None:
    """Throw away what a stream that takes nothing still holds; else Python tries to print it as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def heavy(module: str, name: str) -> Any:
    """A name of a module that loads torch or optuna, imported when a command runs."""
    gc.disable()  # it takes a fifth of the time that torch is imported in
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        gc.enable()


def print_json(data: dict[str, Any]) -> None:
    """Print the one object that --json promises."""
    print(json.dumps(data))


def print_answer(data: dict[str, Any], view: Any, as_json: bool, **style: Any) -> int:
    """Print data as JSON, or the view of it; returns the exit code."""
    print_json(data) if as_json else Terminal().print(view, **style)
    return 0


def print_error(message: str, remedy: str, as_json: bool) -> None:
    """Print an error as one sentence to stderr, with --json also as the object to stdout. A page that was given as an
    argument is not repeated whole."""
    message, remedy = (_LONG_WORD.sub(r"\1...", each)[:_MOST_TOLD] for each in (message, remedy))
    if as_json:
        print_json({"schema": 1, "error": {"message": message, "remedy": remedy}})
    sentence = "".join(c if c.isprintable() else repr(c)[1:-1] for c in f"autofit: {message} {remedy}".strip())
    Terminal(stderr=True, soft_wrap=True).print(sentence, markup=False, highlight=False)
