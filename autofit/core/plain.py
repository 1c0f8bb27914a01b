"""Dataclasses as plain data and back: the one mechanism behind journals, records and `--json`."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from itertools import repeat
from typing import Annotated, Any

from autofit.core.config import Config
from autofit.core.errors import shown

Loss = Annotated[float, "perhaps not finite"]
_NUMBER = (int, float)
_MOST = 2**63  # more than any number of bytes, steps or samples
_ALLOWED = {int: _NUMBER, float: _NUMBER, str: (str,), bool: (bool,), tuple: (list, tuple), Mapping: (Mapping,)}
field_types = cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)  # of a dataclass: the types of its fields, by name


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
    shape, numbers that count nothing, and what a class's own `check_read` refuses, raise AttributeError, TypeError or
    ValueError, a config of more than scalars InputError."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = field_types(kind)
        value = kind(**{name: from_plain(kinds.get(name), each) for name, each in data.items()})
        if hasattr(value, "check_read"):
            value.check_read()
        return value
    if isinstance(kind, type) and issubclass(kind, Config | Enum):
        for each in data.values() if isinstance(data, Mapping) else ():
            _check_number(each)
        return kind(data)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    allowed = _ALLOWED.get(arguments[0] if origin is Annotated else origin or kind)
    if allowed and (not isinstance(data, allowed) or (isinstance(data, bool) and bool not in allowed)):
        raise TypeError(f"{shown(data)} stands where {kind} should")
    if origin is not Annotated:
        _check_number(data)
    if origin in (typing.Union, types.UnionType):  # one type or None, or scalars
        return None if data is None else from_plain(arguments[0], data)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(map(from_plain, repeat(arguments[0]), data))
    if origin is tuple:
        return tuple(from_plain(one, each) for one, each in zip(arguments, data, strict=True))
    if origin is Mapping:
        return {name: from_plain(arguments[1], each) for name, each in data.items()}
    return data


def _check_number(value: Any) -> None:
    """Raise a ValueError for a number that is not finite, or larger than any that is counted or measured."""
    if isinstance(value, _NUMBER) and not -_MOST < value < _MOST:
        raise ValueError(f"{shown(value)} is no figure")
