"""What commands print, and how they reach heavy rooms."""

import importlib
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

INTERRUPTED = 130  # the exit code


def heavy(module: str, name: str) -> Any:
    """A name of a module that loads torch or optuna, imported when a command runs."""
    return getattr(importlib.import_module(module), name)


def print_json(data: dict[str, Any]) -> None:
    """Print the one object that --json promises."""
    print(json.dumps(data))


def print_list(name: str, rows: list[dict[str, Any]], table: Callable[..., Any], as_json: bool) -> int:
    """Print rows as a table, or as JSON under a name; returns the exit code."""
    print_json({"schema": 1, name: rows}) if as_json else Console().print(table(rows))
    return 0


def print_error(message: str, remedy: str, as_json: bool) -> None:
    """Print an error as one sentence to stderr, with --json also as the object to stdout."""
    if as_json:
        print_json({"schema": 1, "error": {"message": message, "remedy": remedy}})
    Console(stderr=True, soft_wrap=True).print(f"autofit: {message} {remedy}".strip(), markup=False, highlight=False)
