"""What commands print, and how they reach heavy rooms."""

import importlib
import json
from typing import Any

from rich.console import Console

INTERRUPTED = 130  # the exit code


def heavy(module: str, name: str) -> Any:
    """A name of a module that loads torch or optuna, imported when a command runs."""
    return getattr(importlib.import_module(module), name)


def print_json(data: dict[str, Any]) -> None:
    """Print the one object that --json promises."""
    print(json.dumps(data))


def print_answer(data: dict[str, Any], view: Any, as_json: bool, **style: Any) -> int:
    """Print data as JSON, or the view of it; returns the exit code."""
    print_json(data) if as_json else Console().print(view, **style)
    return 0


def print_error(message: str, remedy: str, as_json: bool) -> None:
    """Print an error as one sentence to stderr, with --json also as the object to stdout."""
    if as_json:
        print_json({"schema": 1, "error": {"message": message, "remedy": remedy}})
    Console(stderr=True, soft_wrap=True).print(f"autofit: {message} {remedy}".strip(), markup=False, highlight=False)
