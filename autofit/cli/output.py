"""What commands print: one JSON object, a table, a sentence about what went wrong; and how heavy rooms are reached."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

INTERRUPTED = 130


def heavy(module: str, name: str) -> Any:
    """What a command needs of a room that loads torch or optuna."""
    return getattr(importlib.import_module(module), name)


def print_json(data: dict[str, Any]) -> None:
    """The one object that --json promises."""
    print(json.dumps(data))


def print_list(name: str, rows: list[dict[str, Any]], table: Callable[..., Any], as_json: bool) -> int:
    """Rows as a table, or as JSON under a name; the exit code."""
    print_json({"schema": 1, name: rows}) if as_json else Console().print(table(rows))
    return 0


def tell_error(message: str, remedy: str, as_json: bool) -> None:
    """What went wrong as one sentence on stderr, with --json also as the object on stdout."""
    if as_json:
        print_json({"schema": 1, "error": {"message": message, "remedy": remedy}})
    Console(stderr=True, soft_wrap=True).print(f"autofit: {message} {remedy}".strip(), markup=False, highlight=False)
