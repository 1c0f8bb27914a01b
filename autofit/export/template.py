"""Templates of emitted Python: text with `$slots`, filled so that the result reads as if written by hand.

A slot alone on its line takes any number of lines, indented as the slot is; none at all removes the line. A slot inside
a line is replaced in place. That is all there is: a template holds no conditions and no loops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

WIDTH = 100  # columns of the emitted text
_SLOT = re.compile(r"\$([a-z_]+)")


def template(name: str) -> str:
    """The text of a template that lies beside this module."""
    return files("autofit.export").joinpath("templates", f"{name}.txt").read_text(encoding="utf-8")


def fill(text: str, slots: Mapping[str, str | Sequence[str]]) -> str:
    """The text with every slot filled; a slot without a value is an error of ours (KeyError)."""
    lines: list[str] = []
    for line in text.splitlines():
        alone = _SLOT.fullmatch(line.strip())
        if alone:
            indent = line[: len(line) - len(line.lstrip())]
            value = slots[alone[1]]
            inserted = value.splitlines() if isinstance(value, str) else value
            lines.extend(f"{indent}{each}".rstrip() for each in inserted)
        else:
            lines.append(_SLOT.sub(lambda slot: str(slots[slot[1]]), line))
    return "\n".join(lines) + "\n"


def literal(value: Any, indent: int = 0, used: int = 0) -> str:
    """Plain data as Python source: on one line where it fits beside `used` columns, else on lines filled with items."""
    flat = _flat(value)
    if len(flat) + indent + used <= WIDTH - 1 or not isinstance(value, dict | list | tuple) or not value:
        return flat
    inner = " " * (indent + 4)
    if isinstance(value, dict):
        items = [f"{_flat(key)}: {literal(each, indent + 4, len(_flat(key)) + 2)}" for key, each in value.items()]
        opening, closing = "{", "}"
    else:
        items = [literal(each, indent + 4) for each in value]
        opening, closing = "[", "]"
    body = "\n".join(f"{inner}{line}" for line in packed(items, WIDTH - indent - 4))
    return f"{opening}\n{body}\n{' ' * indent}{closing}"


def packed(items: Sequence[str], width: int) -> list[str]:
    """Items with commas behind them, as many on a line as fit; one of several lines begins a line of its own."""
    lines: list[str] = []
    for item in items:
        if lines and "\n" not in lines[-1] + item and len(lines[-1]) + len(item) + 2 <= width:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")
    return lines


def call(function: str, arguments: Sequence[str], *, indent: int) -> list[str]:
    """A call on one line where it fits, else with its arguments on lines of their own."""
    flat = f"{function}({', '.join(arguments)})"
    if indent + len(flat) <= WIDTH:
        return [flat]
    return [f"{function}(", *(f"    {line}" for line in packed(arguments, WIDTH - indent - 4)), ")"]


def _flat(value: Any) -> str:
    """One-line source of plain data, text in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flat(key)}: {_flat(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flat(each) for each in value) + "]"
    if isinstance(value, str):
        source = repr(value)
        return source if '"' in value or source[0] == '"' else '"' + source[1:-1].replace("\\'", "'") + '"'
    if isinstance(value, float) and value - value != 0:  # inf and nan have no literal
        return f'float("{value}")'
    return repr(value)


def import_from(module: str, *names: str) -> str:
    """An import statement, or several where the names do not fit on one line."""
    start = f"from {module} import "
    lines = packed(names, WIDTH - len(start) + 1)  # whose last comma falls away
    return "\n".join(f"{start}{line.removesuffix(',')}" for line in lines)


def plain(text: object) -> str:
    """Text from outside, made safe to stand in a docstring: one line, no quotes that close it, no escapes."""
    return re.sub(r"\s+", " ", str(text).replace("\\", "/").replace('"', "'")).strip()
