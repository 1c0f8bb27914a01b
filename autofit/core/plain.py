"""Dataclasses as plain data and back: the one mechanism behind journals, records and `--json`."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

from autofit.core.config import Config
from autofit.core.errors import InputError, shown

Loss = Annotated[float, "perhaps not finite"]
_NUMBER = (int, float)
_MOST = 2**63  # more than any number of bytes, steps or samples
# What reading data of another shape raises.
UNREADABLE = (AttributeError, InputError, LookupError, RecursionError, TypeError, ValueError)
_ALLOWED = {
    int: _NUMBER,
    float: _NUMBER,
    str: (str,),
    bool: (bool,),
    tuple: (list, tuple),
    Mapping: (Mapping,),
}


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    return typing.get_type_hints(kind, include_extras=True)


def to_plain(value: Any) -> Any:
    """Dicts, lists and scalars that hold the value; fields keep their order."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return list(map(to_plain, value))
    if isinstance(value, Enum):
        return value.value
    return value


def from_plain(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `to_plain` was given; absent fields take their defaults.

    Data of another shape, numbers that count nothing, and what a class's own `check_read` refuses,
    raise AttributeError, TypeError or ValueError, a config of more than scalars InputError.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = field_types(kind)
        fields = {name: from_plain(kinds.get(name), item) for name, item in data.items()}
        value = kind(**fields)
        if hasattr(value, "check_read"):
            value.check_read()
        return value

    if isinstance(kind, type) and issubclass(kind, Config | Enum):
        if isinstance(data, Mapping):
            for item in data.values():
                _check_number(item)
        return kind(data)

    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # one type or None, or scalars
        return None if data is None else from_plain(arguments[0], data)

    is_loss = origin is Annotated
    allowed = _ALLOWED.get(arguments[0] if is_loss else origin or kind)
    if allowed:
        is_unwanted_bool = isinstance(data, bool) and bool not in allowed
        if is_unwanted_bool or not isinstance(data, allowed):
            raise TypeError(f"{shown(data)} stands where {kind} should")
    if not is_loss:
        _check_number(data)

    if origin is tuple:
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(data)
        pairs = zip(arguments, data, strict=True)
        return tuple(from_plain(argument, item) for argument, item in pairs)
    if origin is Mapping:
        return {name: from_plain(arguments[1], item) for name, item in data.items()}
    return data


def _check_number(value: Any) -> None:
    """Raise a ValueError for a number that is not finite, or larger than any that is counted."""
    if isinstance(value, _NUMBER) and not -_MOST < value < _MOST:
        raise ValueError(f"{shown(value)} is no figure")
