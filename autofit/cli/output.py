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

# An error is cut to so many characters, and its words to 400, which most paths are shorter than.
_MOST_TOLD = 2000
_LONG_WORD = re.compile(r"(\S{400})\S+")


class _Stderr(io.FileIO):
    """Drops what it cannot print, so that a full disk or a reader that is gone ends no training."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            drop_rest(self.fileno())
            return len(data)


def open_streams() -> None:
    """Make stdout and stderr print any character.

    A stream that was closed when the process started is not given to the first file that is opened.
    A closed stderr goes nowhere; a closed stdout is an OSError, before a command works for nothing.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        pass
    os.close(number)

    if sys.stderr is None:
        sys.stderr = io.StringIO()
    elif (stream := sys.__stderr__) is not None and stream is sys.stderr:
        raw = io.BufferedWriter(_Stderr(stream.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            raw,
            stream.encoding,
            "backslashreplace",
            line_buffering=True,
        )

    if sys.stdout is None:
        raise OSError(errno.EBADF, "it is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it


def drop_rest(stream: int) -> None:
    """Throw away what a stream that takes nothing holds; else Python tries to print it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def heavy(module: str, name: str) -> Any:
    """A name of a module that loads torch or optuna, imported when a command runs."""
    gc.disable()  # the collector takes a fifth of the time of importing torch
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        gc.enable()


def print_json(data: dict[str, Any]) -> None:
    """Print the one object that --json promises."""
    print(json.dumps(data))


def print_answer(data: dict[str, Any], view: Any, as_json: bool, **style: Any) -> int:
    """Print data as JSON, or the view of it; returns the exit code."""
    if as_json:
        print_json(data)
    else:
        Terminal().print(view, **style)
    return 0


def print_error(message: str, remedy: str, as_json: bool) -> None:
    """Print an error as one sentence to stderr, with --json also as the object to stdout.

    Long arguments that the message repeats, such as a whole page of text, are cut.
    """
    message = _LONG_WORD.sub(r"\1...", message)[:_MOST_TOLD]
    remedy = _LONG_WORD.sub(r"\1...", remedy)[:_MOST_TOLD]
    if as_json:
        print_json({"schema": 1, "error": {"message": message, "remedy": remedy}})

    sentence = ""
    for character in f"autofit: {message} {remedy}".strip():
        sentence += character if character.isprintable() else repr(character)[1:-1]
    print(sentence, file=sys.stderr)  # not by rich, which may lack the memory
