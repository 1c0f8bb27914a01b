"""Emitted text: templates with `$slots`, plain data as Python source, YAML files below a comment.

A slot alone on its line takes any number of lines, indented like the slot; none removes the line. A
slot inside a line is replaced in place. Templates hold no conditions and no loops.
"""

import json
import math
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
    """The text with every slot filled.

    Raises:
        KeyError: a slot has no value.
    """

    def filled(slot: re.Match[str]) -> str:
        return str(slots[slot[1]])

    lines: list[str] = []
    for line in lines_of(text):
        alone = _SLOT.fullmatch(line.strip())
        if alone is None:
            lines.append(_SLOT.sub(filled, line))
            continue

        inserted = slots[alone[1]]
        if isinstance(inserted, str):
            inserted = lines_of(inserted)
        indent = line[: len(line) - len(line.lstrip())]
        lines += [f"{indent}{row}".rstrip() for row in inserted]

    return "\n".join(lines) + "\n"


def literal(value: Any, indent: int = 0, used: int = 0) -> str:
    """Plain data as Python source: on one line if it fits beside `used` columns, else packed on
    several lines."""
    flat = _flat(value)
    fits = indent + used + len(flat) < WIDTH
    if fits or not value or not isinstance(value, dict | list | tuple):
        return flat

    items = []
    opening = "["
    closing = "]"
    if isinstance(value, dict):
        opening = "{"
        closing = "}"
        for key, item in value.items():
            name = _flat(key)
            written = literal(item, indent + 4, len(name) + 2)
            items.append(f"{name}: {written}")
    else:
        items = [literal(item, indent + 4) for item in value]

    margin = " " * indent
    lines = [f"{margin}    {line}" for line in packed(items, WIDTH - indent - 4)]
    return "\n".join([opening, *lines, f"{margin}{closing}"])


def packed(items: Sequence[str], width: int) -> list[str]:
    """Items and their commas, as many on a line as fit.

    An item of several lines starts a new line.
    """
    lines: list[str] = []
    for item in items:
        last = lines[-1] if lines else "\n"
        is_flat = "\n" not in last + item
        if is_flat and len(last) + len(item) + 2 <= width:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")

    return lines


def call(function: str, arguments: Sequence[str], *, indent: int) -> list[str]:
    """A call, on one line if it fits, else with its arguments on lines of their own."""
    flat = f"{function}({', '.join(arguments)})"
    if indent + len(flat) <= WIDTH:
        return [flat]

    lines = [f"    {line}" for line in packed(arguments, WIDTH - indent - 4)]
    return [f"{function}(", *lines, ")"]


def _flat(value: Any) -> str:
    """One-line source of plain data, text in double quotes."""
    if isinstance(value, str):
        return python_string(value)
    if isinstance(value, dict):
        items = [f"{_flat(key)}: {_flat(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flat, value))}]"
    if isinstance(value, float) and not math.isfinite(value):  # inf and nan have no literal
        return f'float("{value}")'

    return repr(value)


def import_from(module: str, *names: str) -> str:
    """An import statement, or several if the names do not fit on one line."""
    start = f"from {module} import "
    lines = packed(names, WIDTH - len(start) + 1)  # whose last comma falls away
    return "\n".join(start + line.removesuffix(",") for line in lines)


def keyword_arguments(values: Mapping[str, Any]) -> list[str]:
    """`name=value` for every value, as source."""
    return [f"{name}={literal(value)}" for name, value in values.items()]


def toml_file(header: Sequence[str], keys: Mapping[str, Any]) -> str:
    """A TOML file below its header, of texts, numbers, truth values and lists of these."""
    lines = [f"{name} = {_toml(value)}" for name, value in keys.items()]
    return "\n".join([comment(header), *lines]) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def yaml_file(header: Sequence[str], keys: Mapping[str, Any]) -> str:
    """A YAML file below its header.

    Floats are written as 2.0e-05: a YAML 1.1 parser reads 2e-05 as text.
    """
    return f"{comment(header)}\n{dump(dict(keys))}"
