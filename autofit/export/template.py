"""Emitted text: templates with `$slots`, plain data as Python source, YAML files below a comment.

A slot alone on its line takes any number of lines, indented like the slot; none removes the line. A slot inside a line
is replaced in place. Templates hold no conditions and no loops.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from autofit.core.quoting import comment, lines_of, python_string
from autofit.core.strict_yaml import dump

WIDTH = 100  # columns of the emitted text
_SLOT = re.compile(r"\$([a-z_]+)")


def template(name: str) -> str:
    """The text of `templates/NAME.txt`."""
    return files("autofit.export").joinpath("templates", f"{name}.txt").read_text(encoding="utf-8")


def fill(text: str, slots: Mapping[str, str | Sequence[str]]) -> str:
    """The text with every slot filled; raises KeyError for a slot without a value."""
    lines: list[str] = []
    for line in lines_of(text):
        alone = _SLOT.fullmatch(line.strip())
        if alone:
            indent = line[: len(line) - len(line.lstrip())]
            value = slots[alone[1]]
            inserted = lines_of(value) if isinstance(value, str) else value
            lines.extend(f"{indent}{each}".rstrip() for each in inserted)
        else:
            lines.append(_SLOT.sub(lambda slot: str(slots[slot[1]]), line))

    return "\n".join(lines) + "\n"


def literal(value: Any, indent: int = 0, used: int = 0) -> str:
    """Plain data as Python source: on one line if it fits beside `used` columns, else packed on several lines."""
    flat = _flat(value)
    if (
        len(flat) + indent + used <= WIDTH - 1
        or not isinstance(value, dict | list | tuple)
        or not value
    ):
        return flat

    inner = " " * (indent + 4)
    if isinstance(value, dict):
        items = [
            f"{_flat(key)}: {literal(each, indent + 4, len(_flat(key)) + 2)}"
            for key, each in value.items()
        ]
        opening, closing = "{", "}"
    else:
        items = [literal(each, indent + 4) for each in value]
        opening, closing = "[", "]"

    body = "\n".join(f"{inner}{line}" for line in packed(items, WIDTH - indent - 4))

    return f"{opening}\n{body}\n{' ' * indent}{closing}"


def packed(items: Sequence[str], width: int) -> list[str]:
    """Items and their commas, as many on a line as fit; an item of several lines starts a new line."""
    lines: list[str] = []
    for item in items:
        if lines and "\n" not in lines[-1] + item and len(lines[-1]) + len(item) + 2 <= width:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")

    return lines


def call(function: str, arguments: Sequence[str], *, indent: int) -> list[str]:
    """A call, on one line if it fits, else with its arguments on lines of their own."""
    flat = f"{function}({', '.join(arguments)})"
    if indent + len(flat) <= WIDTH:
        return [flat]

    return [
        f"{function}(",
        *(f"    {line}" for line in packed(arguments, WIDTH - indent - 4)),
        ")",
    ]


def _flat(value: Any) -> str:
    """One-line source of plain data, text in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flat(key)}: {_flat(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flat(each) for each in value) + "]"
    if isinstance(value, str):
        return python_string(value)
    if isinstance(value, float) and value - value != 0:  # inf and nan have no literal
        return f'float("{value}")'

    return repr(value)


def import_from(module: str, *names: str) -> str:
    """An import statement, or several if the names do not fit on one line."""
    start = f"from {module} import "
    lines = packed(names, WIDTH - len(start) + 1)  # whose last comma falls away

    return "\n".join(f"{start}{line.removesuffix(',')}" for line in lines)


def keyword_arguments(values: Mapping[str, Any]) -> list[str]:
    """`name=value` for every value, as source."""
    return [f"{name}={literal(value)}" for name, value in values.items()]


def yaml_file(header: Sequence[str], keys: Mapping[str, Any]) -> str:
    """A YAML file below its header. Floats are written as 2.0e-05: a YAML 1.1 parser reads 2e-05 as text."""
    return f"{comment(header)}\n{dump(dict(keys))}"
