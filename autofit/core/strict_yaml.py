"""YAML as autofit reads it: safe tags only, no duplicated keys, and errors that name the file and line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from autofit.core.errors import InputError

_MERGE = "tag:yaml.org,2002:merge"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which plain YAML resolves in silence to the last one."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:  # `<<: *base`, whose keys a mapping may override
            continue
        key = loader.construct_object(key_node, deep=True)
        wrong = None if isinstance(key, Hashable) else "a key must be a plain word"
        if not wrong and key in keys:
            wrong = f"the key {key!r} is given twice"
        if wrong:
            raise yaml.constructor.ConstructorError(None, None, wrong, key_node.start_mark)
        keys.add(key)
    loader.flatten_mapping(node)
    return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str, source: str) -> Any:
    """Parse one YAML document of plain data without duplicated keys; `source` names it in InputErrors."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML lets through what its constructors raise: on 2024-13-01, on `!!int` without a number, on deep nesting.
        reason = str(error).replace("\n", " ")
        if isinstance(error, yaml.MarkedYAMLError) and error.problem:
            line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
            reason = f"{error.problem}{line}"
        raise InputError(f"{source} cannot be read as YAML: {reason}.", "Correct that line.") from error


def load_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that must hold one mapping with text keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"the file {path} is not there.", "Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file {path} cannot be read: {error}.", "Give a readable YAML text file.") from error
    value = parse(text, str(path))
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{path} should hold a mapping of names to values, not {type(value).__name__}.")
    return value


def dump(value: Any) -> str:
    """Write plain data as block YAML in the order given."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
