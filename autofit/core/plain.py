"""Dataclasses as plain data and back: the one mechanism behind journals, records and `--json`."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from itertools import repeat
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import shown

_NUMBER = (int, float)
_ALLOWED = {int: _NUMBER, float: _NUMBER, str: (str,), bool: (bool,), tuple: (list, tuple), Mapping: (Mapping,)}
field_types = cache(typing.get_type_hints)  # of a dataclass: the types of its fields, by name


def to_plain(value: Any) -> Any:
    """Dicts, lists and scalars that hold the value; fields keep their order."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `to_plain` was given; fields that are absent take their defaults. Data of another
    shape raises AttributeError, TypeError or ValueError, a config of more than scalars InputError."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = field_types(kind)
        return kind(**{name: from_plain(kinds.get(name), each) for name, each in data.items()})
    if isinstance(kind, type) and issubclass(kind, Config | Enum):
        return kind(data)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    allowed = _ALLOWED.get(origin or kind)
    if allowed and (not isinstance(data, allowed) or (isinstance(data, bool) and bool not in allowed)):
        raise TypeError(f"{shown(data)} stands where {kind} should")
    if origin in (typing.Union, types.UnionType):  # one type or None, or scalars
        return None if data is None else from_plain(arguments[0], data)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(map(from_plain, repeat(arguments[0]), data))
    if origin is tuple:
        return tuple(from_plain(one, each) for one, each in zip(arguments, data, strict=True))
    if origin is Mapping:
        return {name: from_plain(arguments[1], each) for name, each in data.items()}
    return data
