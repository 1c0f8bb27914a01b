"""The registry of tools: every module of this package that makes a TOOL is one, nothing else to
edit."""

import functools
import importlib
import pkgutil
from typing import Any

from autofit.core.errors import unknown
from autofit.export.tool import Tool


@functools.cache
def all_tools() -> tuple[Tool, ...]:
    """Every tool that configs are exported to, in alphabetical order."""
    modules = (
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
    )
    return tuple(sorted((module.TOOL for module in modules), key=lambda tool: tool.name))


def describe_tools() -> list[dict[str, Any]]:
    """The rows of `autofit export --to list --json`."""
    rows = []
    for tool in all_tools():
        row = {
            "name": tool.name,
            "title": tool.title,
            "versions": list(tool.versions),
            "tasks": list(tool.tasks),
            "run": tool.usage,
        }
        rows.append(row)

    return rows


def tool_named(name: str) -> Tool:
    """The tool of that name; raises InputError, which names the nearest one."""
    for tool in all_tools():
        if tool.name == name:
            return tool

    raise unknown("tool", name, [tool.name for tool in all_tools()])
