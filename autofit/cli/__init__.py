"""The command line: the only room that parses arguments, prints to the user or sets an exit code.

Progress goes to stderr, the answer to stdout; with --json stdout holds exactly one JSON object, on
every exit. Each command is a file of its own; this one starts and ends them. Heavy modules are
imported by name when a command runs, so that `autofit --help` answers at once.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import autofit
from autofit.cli import (
    doctor,
    estimate,
    explain,
    export,
    models,
    report,
    search,
    spaces,
    train,
    tune,
)
from autofit.cli.address_space import check_address_space
from autofit.cli.help import Command, PlainFlags
from autofit.cli.options import Version
from autofit.cli.output import INTERRUPTED, drop_rest, open_streams, print_error, print_json
from autofit.core.beginning import counted_from_now
from autofit.core.environment import set_defaults
from autofit.core.errors import (
    MEMORY_FULL,
    AutofitError,
    InputError,
    ProbeError,
    describe_error,
    lacks_memory,
)

# typer ships its own copy of click or uses click itself, by version; this is whichever it is.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]

# What the system raises where a stream, or a file, cannot be written to.
_OF_STREAMS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE, errno.EBADF)
_OF_FILES = (*_OF_STREAMS, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)

_HOW_TO_START = """\
autofit finds the fastest PyTorch training configuration that fits your memory, by measuring real steps.

  autofit search --model llama-3.1-8b --gpu-mem 24              on a GPU
  autofit search --model tiny-llama --device cpu --mem 2        without one, to see how it goes
  autofit estimate --model llama-3.1-8b --gpu list              which cards would do; needs none

autofit --help lists all commands."""

_COMMANDS: tuple[Callable[..., int], ...] = (
    search.search,
    estimate.estimate,
    train.train,
    tune.tune,
    export.export,
    report.report,
    explain.explain,
    doctor.doctor,
    models.models,
    spaces.spaces,
)
_FOLLOW_STEPS = ("search", "estimate", "train", "doctor")


class _ReaderGoneError(Exception):
    """Nobody reads the answer any more."""


@contextmanager
def _ends_told() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise typer.Abort from error
    except BrokenPipeError as error:
        raise _ReaderGoneError from error
    except SystemExit as error:  # by which rich ends where nobody reads the help
        if isinstance(error.__context__, BrokenPipeError):
            raise _ReaderGoneError from error
        raise


class _Commands(PlainFlags, TyperGroup):
    """Reports Ctrl-C, and a reader that is gone, as any other end; typer itself exits without a
    word."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _ends_told():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _ends_told():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Find the fastest PyTorch training configuration that fits your memory, by measuring real steps.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",  # keeps the lines of examples apart
    pretty_exceptions_enable=False,
)
for _command in _COMMANDS:
    app.command(cls=Command)(_command)


@app.callback(invoke_without_command=True)
def _start(context: typer.Context, version: Version = False) -> None:
    if version:
        print(f"autofit {autofit.__version__}")
        raise typer.Exit

    if context.invoked_subcommand in _FOLLOW_STEPS:
        check_address_space()
    if context.invoked_subcommand is None:
        print(_HOW_TO_START, file=sys.stderr)
        raise typer.Exit(InputError.exit_code)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    given = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in given

    def command() -> Any:
        set_defaults()  # before it loads torch
        open_streams()
        with counted_from_now():
            return app(given, prog_name="autofit", standalone_mode=False, obj=given)

    try:
        code = _run(command, as_json)
        sys.stdout.flush()  # or a full disk is found out after the end
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STREAMS:
            raise
        drop_rest(1)
        message = f"the answer cannot be printed: {error.strerror}."
        print_error(message, "Give stdout somewhere to go.", as_json=False)
        code = InputError.exit_code
    sys.exit(code)


def _run(command: Callable[[], Any], as_json: bool) -> int:
    """Run a command, and print its error as one sentence or JSON object; returns the exit code."""
    try:
        _check_current_directory()
        return int(command() or 0)
    except AutofitError as error:
        print_error(error.message, error.remedy, as_json)
        return error.exit_code
    except UsageError as error:
        message = getattr(error, "format_message", lambda: "")()
        if message[-1:].isalnum():
            message += "."
        print_error(message, "See --help.", as_json)
        return InputError.exit_code
    except _ReaderGoneError as error:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted.", "", as_json)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_FILES:
            message = f"{error.filename} cannot be used: {error.strerror}."
            print_error(message, "Check the path.", as_json)
            return InputError.exit_code

        # tempfile raises it on a full disk.
        if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
            message = f"temporary files cannot be written: {error.strerror}."
            print_error(message, "Make room, or set TMPDIR.", as_json)
            return InputError.exit_code

        if lacks_memory(error):
            print_error(*MEMORY_FULL, as_json)
            return ProbeError.exit_code

        if as_json:  # on every exit; the traceback, which somebody has to see, goes to stderr
            message = f"autofit failed: {describe_error(error)}"
            print_json({"schema": 1, "error": {"message": message, "remedy": "Please report it."}})
        raise


def _check_current_directory() -> None:
    """Raise an InputError where it is gone: oneMKL would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        message = "the current directory does not exist any more."
        raise InputError(message, "Change to one that does.") from error
