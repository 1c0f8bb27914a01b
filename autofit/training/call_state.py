"""What a model and a loss keep from one call to the next: counters, running numbers, lists.

A loss that is annealed by the number of its calls changes in micro-batches, which are more calls.
Calls that only try a loss out leave nothing behind in the user's counters and lists.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Self

from torch import nn

_LATER = 1_000_003  # calls from now; no multiple of what a counter may be divided by


@dataclass(frozen=True)
class _Slot:
    """A place that holds a number."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class CallState:
    """The numbers and lists that a loss, and a model, hold now."""

    def __init__(self, loss: Any, model: nn.Module | None = None) -> None:
        scopes = list(_scopes(loss))
        buffers: list[_Slot] = []
        if model is not None:
            scopes += map(vars, model.modules())
            buffers = _of_buffers(model)

        slots = []
        for scope in scopes:
            slots += [_of_key(scope, key) for key in scope]
        slots += _of_cells(loss)
        slots += buffers

        self._numbers = []
        lists = {}
        for slot in slots:
            value = slot.read()
            if _is_number(value):
                self._numbers.append((slot, value))
            elif type(value) is list:
                lists[id(value)] = value
        self._lists = [(items, len(items)) for items in lists.values()]

    @classmethod
    @contextmanager
    def preserved(cls, loss: Any, *, lists: bool = True) -> Iterator[Self]:
        """Undo what calls inside do to the numbers of a loss.

        With `lists`, also what they do to the length of its lists.
        """
        state = cls(loss)
        if not lists:
            state._lists.clear()
        try:
            yield state
        finally:
            state.restore()

    def moved(self) -> list[str]:
        """The names of the numbers that have changed."""
        return [slot.name for slot, number in self._numbers if slot.read() != number]

    def advance(self) -> None:
        """Make the numbers that have moved what many more calls may make of them."""
        for slot, number in self._numbers:
            now = slot.read()
            if now != number:
                slot.write(type(now)(now + _LATER))

    def restore(self) -> None:
        """Make numbers what they were, and take away what was added to lists."""
        for slot, number in self._numbers:
            if slot.read() != number:
                slot.write(number)
        for items, length in self._lists:
            del items[length:]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _of_key(scope: dict[str, Any], key: str) -> _Slot:
    read = functools.partial(scope.get, key)
    write = functools.partial(scope.__setitem__, key)
    return _Slot(str(key), read, write)


def _of_buffers(model: nn.Module) -> list[_Slot]:
    slots = []
    for name, buffer in model.named_buffers():
        if buffer.numel() == 1 and not buffer.is_complex():
            slots.append(_Slot(name, buffer.item, buffer.fill_))
    return slots


def _without_partial(loss: Any) -> Any:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _function(loss: Any) -> FunctionType | None:
    """The function in Python that computes a loss; None where there is none."""
    loss = _without_partial(loss)
    if isinstance(loss, MethodType):
        loss = loss.__func__
    elif not isinstance(loss, FunctionType):
        loss = vars(type(loss)).get("forward" if isinstance(loss, nn.Module) else "__call__")

    if isinstance(loss, FunctionType):
        return loss
    return None


def _of_cells(loss: Any) -> list[_Slot]:
    """The variables of functions around it."""
    function = _function(loss)
    if function is None:
        return []

    slots = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read = functools.partial(_content, cell)
        write = functools.partial(setattr, cell, "cell_contents")
        slots.append(_Slot(name, read, write))
    return slots


def _content(cell: Any) -> Any:
    """What a variable of a function around holds; None before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _scopes(loss: Any) -> Iterator[dict[str, Any]]:
    """The attributes of a loss, the global names that it uses, and what these hold."""
    plain = _without_partial(loss)
    found: list[Any] = [getattr(plain, "__self__", plain)]
    function = _function(loss)
    if function is not None:
        module = function.__globals__
        used = {name: module[name] for name in names_of(function.__code__) if name in module}
        yield _Globals(module, used)
        found += used.values()
        found += [slot.read() for slot in _of_cells(loss)]
        found += function.__defaults__ or ()

    seen: set[int] = set()
    for value in found:
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen.add(id(value))

        if isinstance(value, nn.Module):
            yield from map(vars, value.modules())
        elif type(value) is dict:
            yield value
        elif isinstance(getattr(value, "__dict__", None), dict):
            yield vars(value)


class _Globals(dict[str, Any]):
    """Some names of a module; writing one writes that of the module."""

    def __init__(self, module: dict[str, Any], names: dict[str, Any]) -> None:
        super().__init__(names)
        self._module = module

    def get(self, name: str, default: Any = None) -> Any:
        return self._module.get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        self._module[name] = value


def names_of(code: CodeType) -> set[str]:
    """The names that code uses, also that of functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_of(constant)
    return names
