"""YAML as autofit reads it: safe tags, no duplicated keys, and errors that name file and line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from autofit.core.errors import InputError, printable, shown
from autofit.core.files import expanded, read_text

_MERGE = "tag:yaml.org,2002:merge"
_MOST_BYTES = 2**24  # of a file
_MOST_VALUES = 2**20  # that it holds with every alias written out
_MOST_MERGED = 2**16  # pairs of the mappings that merge others (`<<: *base`), with those
_MOST_DIGITS = 1000  # of a number: in base 60 (1:30:00) its time grows with the square of them


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which plain YAML silently takes the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}
        self._merged = 0  # pairs so far

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == _MERGE for key, _ in node.value):
            self._merged += _size(node, self._sizes)
        if self._merged > _MOST_MERGED:
            raise _error("its mappings merge too much", node)
        super().flatten_mapping(node)


# The parser in C is ten times as fast, but deep nesting ends its process.
class _QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads files of autofit's own, in which a key may not be given twice either."""


def _error(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:  # `<<: *base`, whose keys a mapping may override
            continue

        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise _error("a key must be a plain word", key_node)
        if key in keys:
            raise _error(f"the key {shown(key)} is given twice", key_node)
        keys.add(key)

    loader.flatten_mapping(node)
    return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))


def _size(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """The pairs of a mapping, or of all in a list of them, with those that it will merge."""
    if node in known:
        return known[node]
    known[node] = _MOST_MERGED + 1  # until it is counted: one within itself never ends

    size = 0
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            size += _size(value, known) if key.tag == _MERGE else 1
    else:
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                size += _size(item, known)
    known[node] = size
    return size


def _number(loader: _StrictLoader, node: yaml.ScalarNode) -> int | float:
    if len(node.value) > _MOST_DIGITS:
        raise _error(f"a number has {len(node.value):,} characters", node)
    number: int | float = _NUMBERS[node.tag](loader, node)
    return number


_NUMBERS = {
    "tag:yaml.org,2002:int": yaml.SafeLoader.construct_yaml_int,
    "tag:yaml.org,2002:float": yaml.SafeLoader.construct_yaml_float,
}
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _tag in _NUMBERS:
    _StrictLoader.add_constructor(_tag, _number)
_QuickLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


# PyYAML lets through what its constructors raise: on 2024-13-01, on `!!int` without a number, on
# deep nesting.
_RAISED = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    ValueError,
)


def parse(text: str, source: str) -> Any:
    """The data of one YAML document without duplicated keys; `source` names it in InputErrors."""
    try:
        value = yaml.load(text, Loader=_StrictLoader)
        _count(value, {})
        return value
    except _RAISED as error:
        reason = str(error).replace("\n", " ")
        if isinstance(error, yaml.MarkedYAMLError) and error.problem:
            reason = error.problem
            if error.problem_mark:
                reason += f" (line {error.problem_mark.line + 1})"
        message = f"{source} cannot be read as YAML: {printable(reason)}."
        raise InputError(message, "Correct that line.") from error


def _count(value: Any, known: dict[int, int]) -> int:
    """The number of values with every alias written out, as it is in an error.

    Raises ValueError for too many, such as a few lines can make ("billion laughs"), and for a value
    within itself.
    """
    if not isinstance(value, dict | list | set | tuple):
        return 1

    if id(value) not in known:
        known[id(value)] = _MOST_VALUES  # until it is counted
        items = value
        if isinstance(value, dict):
            items = (*value, *value.values())
        known[id(value)] = 1 + sum(_count(item, known) for item in items)
    if known[id(value)] >= _MOST_VALUES:
        raise ValueError("its aliases hold too much")
    return known[id(value)]


def load_own(path: Path) -> dict[str, Any]:
    """Read the mapping in a file that is a part of autofit."""
    text = path.read_text(encoding="utf-8")
    return dict(yaml.load(text, Loader=_QuickLoader))


def load_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that must hold one mapping with text keys."""
    try:
        text = read_text(expanded(path), most=_MOST_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"the file {path} is not there.", "Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"the file {path} cannot be read: {reason}."
        raise InputError(message, "Give a readable YAML text file.") from error

    value = parse(text, str(path))
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        kind = type(value).__name__
        raise InputError(f"{path} should hold a mapping of names to values, not {kind}.")
    return value


class _Dumper(yaml.SafeDumper):
    """SafeDumper that escapes what cannot be printed: only some parsers end a line at U+2028."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(value: Any) -> str:
    """Write plain data as block YAML in the order given; text stays text, whoever wrote it."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
