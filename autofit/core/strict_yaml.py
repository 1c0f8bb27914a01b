"""YAML as autofit reads it: safe tags only, no duplicated keys, and errors that name the file and line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from autofit.core.errors import InputError, printable, shown
from autofit.core.files import expanded, read_text

_MERGE = "tag:yaml.org,2002:merge"
_MOST_BYTES, _MOST_VALUES = 2**24, 2**20  # of a file, and of what it holds with every alias written out
_MOST_MERGED = 2**16  # pairs of the mappings that merge others (`<<: *base`), with those
_MOST_DIGITS = 1000  # of a number: those of base 60 (1:30:00) take time by the square of their length


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which plain YAML resolves in silence to the last one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}
        self._merged = 0  # pairs so far

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == _MERGE for key, _ in node.value):
            self._merged += _size(node, self._sizes)
        if self._merged > _MOST_MERGED:
            raise yaml.constructor.ConstructorError(None, None, "its mappings merge too much", node.start_mark)
        super().flatten_mapping(node)


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:  # `<<: *base`, whose keys a mapping may override
            continue
        key = loader.construct_object(key_node, deep=True)
        wrong = None if isinstance(key, Hashable) else "a key must be a plain word"
        if not wrong and key in keys:
            wrong = f"the key {shown(key)} is given twice"
        if wrong:
            raise yaml.constructor.ConstructorError(None, None, wrong, key_node.start_mark)
        keys.add(key)
    loader.flatten_mapping(node)
    return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))


def _size(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """The pairs of a mapping, or of all in a list of them, with those that it merges; known before they are merged."""
    if node not in known:
        known[node] = _MOST_MERGED + 1  # until it is counted: one within itself never ends
        if isinstance(node, yaml.MappingNode):
            known[node] = sum(_size(value, known) if key.tag == _MERGE else 1 for key, value in node.value)
        else:
            known[node] = sum(_size(each, known) for each in node.value if isinstance(each, yaml.MappingNode))
    return known[node]


def _number(loader: _StrictLoader, node: yaml.ScalarNode) -> int | float:
    if len(node.value) > _MOST_DIGITS:
        wrong = f"a number has {len(node.value):,} characters"
        raise yaml.constructor.ConstructorError(None, None, wrong, node.start_mark)
    number: int | float = _NUMBERS[node.tag](loader, node)
    return number


_NUMBERS = {
    "tag:yaml.org,2002:int": yaml.SafeLoader.construct_yaml_int,
    "tag:yaml.org,2002:float": yaml.SafeLoader.construct_yaml_float,
}
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _tag in _NUMBERS:
    _StrictLoader.add_constructor(_tag, _number)


def parse(text: str, source: str) -> Any:
    """Parse one YAML document of plain data without duplicated keys; `source` names it in InputErrors."""
    try:
        value = yaml.load(text, Loader=_StrictLoader)
        _count(value, {})
        return value
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
        # PyYAML lets through what its constructors raise: on 2024-13-01, on `!!int` without a number, on deep nesting.
        reason = str(error).replace("\n", " ")
        if isinstance(error, yaml.MarkedYAMLError) and error.problem:
            line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
            reason = f"{error.problem}{line}"
        raise InputError(f"{source} cannot be read as YAML: {printable(reason)}.", "Correct that line.") from error


def _count(value: Any, known: dict[int, int]) -> int:
    """The number of values with every alias written out, as it is in an error. Raises ValueError for too many, such as
    a few lines can make ("billion laughs"), and for a value within itself."""
    if not isinstance(value, dict | list | set | tuple):
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_VALUES  # until it is counted
        held = (*value, *value.values()) if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(each, known) for each in held)
    if known[id(value)] >= _MOST_VALUES:
        raise ValueError("its aliases hold too much")
    return known[id(value)]


def load_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that must hold one mapping with text keys."""
    try:
        text = read_text(expanded(path), most=_MOST_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"the file {path} is not there.", "Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"the file {path} cannot be read: {reason}.", "Give a readable YAML text file.") from error
    value = parse(text, str(path))
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{path} should hold a mapping of names to values, not {type(value).__name__}.")
    return value


class _Dumper(yaml.SafeDumper):
    """SafeDumper that escapes what cannot be printed: only some parsers end a line at U+2028."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    escaped = not text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if escaped else None)


_Dumper.add_representer(str, _text)


def dump(value: Any) -> str:
    """Write plain data as block YAML in the order given; text stays text, whoever wrote it."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
