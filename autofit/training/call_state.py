"""What a model and a loss keep from one call to the next: counters, running numbers, lists.

A loss that is annealed by the number of its calls changes in micro-batches, which are more calls.
Calls that only try a loss out leave nothing behind in the user's counters and lists.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
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
        slots = list(_of_function(loss))
        if model is not None:
            slots += _of_modules(model)

        slots += _of_cells(loss)
        if model is not None:
            slots += _of_buffers(model)

        self._numbers = []
        lists = {}
        for slot in slots:
            value = slot.read()
            if type(value) in (int, float) and math.isfinite(value):
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


def _in_scope(scope: dict[str, Any], names: Iterable[str]) -> Iterator[_Slot]:
    """The places of names in a module, an object or a dict."""
    for name in names:
        read = functools.partial(scope.get, name)
        write = functools.partial(scope.__setitem__, name)
        yield _Slot(str(name), read, write)


def _of_modules(model: nn.Module) -> Iterator[_Slot]:
    """The attributes of a model's modules."""
    for module in model.modules():
        yield from _in_scope(vars(module), vars(module))


def _of_buffers(model: nn.Module) -> Iterator[_Slot]:
    """The buffers of a model that hold one number."""
    for name, buffer in model.named_buffers():
        if buffer.numel() == 1 and not buffer.is_complex():
            yield _Slot(name, buffer.item, buffer.fill_)


def _without_partial(loss: Any) -> Any:
    """The function that a partial function calls."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _function(loss: Any) -> FunctionType | None:
    """The function in Python that computes a loss; None where there is none."""
    loss = _without_partial(loss)
    if isinstance(loss, MethodType):
        loss = loss.__func__
    elif not isinstance(loss, FunctionType):
        method = "forward" if isinstance(loss, nn.Module) else "__call__"
        loss = vars(type(loss)).get(method)

    if isinstance(loss, FunctionType):
        return loss
    return None


def _of_cells(loss: Any) -> Iterator[_Slot]:
    """The variables of functions around a loss."""
    function = _function(loss)
    if function is None:
        return

    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        read = functools.partial(_content, cell)
        write = functools.partial(setattr, cell, "cell_contents")
        yield _Slot(name, read, write)


def _content(cell: Any) -> Any:
    """What a variable of a function around holds; None before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _of_function(loss: Any) -> Iterator[_Slot]:
    """The attributes of a loss, the global names that it uses, and what these hold."""
    plain = _without_partial(loss)
    found: list[Any] = [getattr(plain, "__self__", plain)]
    function = _function(loss)

    if function is not None:
        module = function.__globals__
        used = [name for name in names_of(function.__code__) if name in module]
        yield from _in_scope(module, used)
        found += map(module.__getitem__, used)
        found += [slot.read() for slot in _of_cells(loss)]
        found += function.__defaults__ or ()

    seen: set[int] = set()
    for value in found:
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue

        seen.add(id(value))

        if isinstance(value, nn.Module):
            yield from _of_modules(value)
        elif type(value) is dict:
            yield from _in_scope(value, value)
        elif isinstance(getattr(value, "__dict__", None), dict):
            yield from _in_scope(vars(value), vars(value))


def names_of(code: CodeType) -> set[str]:
    """The names that code uses, also that of functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_of(constant)

    return names
