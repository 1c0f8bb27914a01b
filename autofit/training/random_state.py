"""Random state: every generator that training and its loaders draw from.

torch's (host and device), Python's and numpy's, since augmentations use any of them. They are
captured and restored together, as plain values, arrays and tensors, which a checkpoint reads back
without running code.
"""

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autofit.core.errors import is_whole, sentence

_DEPTH = 8  # how far from a loader generators are looked for
_MOST_ITEMS = 64  # of a container that is looked into
_MOST_SEEN = 10_000  # objects
_NUMPY_NUMBERS = 624  # that its Mersenne Twister makes at once
_Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every generator."""
    return {
        **capture_torch(device),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def capture_torch(device: torch.device) -> dict[str, Any]:
    """The state of torch's generators, in a microsecond.

    numpy's takes 30 to copy, too slow for every step.
    """
    cuda = None
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state(device)

    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restore every captured generator; that of a device only on a device of its kind."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" not in state:
        return

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def check(state: Any, device: torch.device) -> None:
    """Raise a ValueError for what no `capture` made.

    Generators made for that try it; numpy's would read behind its numbers from a wrong position.
    """
    try:
        torch.Generator().set_state(state["torch"])
        if state["cuda"] is not None and device.type == "cuda":
            torch.Generator(device).set_state(state["cuda"])
        if "numpy" not in state:
            return

        random.Random().setstate(state["python"])
        inner = state["numpy"]["state"]
        has_position = is_whole(inner["pos"], 0) and inner["pos"] <= _NUMPY_NUMBERS
        if not has_position or inner["key"].shape != (_NUMPY_NUMBERS,):
            raise ValueError("no position")

        np.random.RandomState().set_state(state["numpy"])
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"no random state: {sentence(error)}") from error


def is_at(state: dict[str, Any], *, torchs: bool = True) -> bool:
    """Whether the host's generators are where they were captured: nothing was drawn since.

    `torchs`: whether torch's generator counts as well.
    """
    now = capture(torch.device("cpu"))
    numpy_now = now["numpy"]["state"]
    numpy_before = state["numpy"]["state"]
    if now["python"] != state["python"] or numpy_now["pos"] != numpy_before["pos"]:
        return False
    if not np.array_equal(numpy_now["key"], numpy_before["key"]):
        return False

    return not torchs or torch.equal(now["torch"], state["torch"])


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[None]:
    """Undo all draws made inside; by default also those on a card that this process uses."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")

    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


def seed_host(seed: int) -> None:
    """Seed what loaders draw from; generators of a device are left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def generators_preserved(loader: Any) -> Iterator[None]:
    """Undo draws from generators of a loader's own.

    They are those of its sampler, its data set, its collator and what they hold. One that is made
    inside is taken away again.
    """
    undo: list[Callable[[], Any]] = []
    empty: list[tuple[Any, str]] = []
    for holder in _reachable_from(loader):
        for name, value in _attributes(holder).items():
            if isinstance(value, _Generator):
                undo.append(_restoring(value))
            elif value is None:
                empty.append((holder, name))

    try:
        yield
    finally:
        for restore_generator in undo:
            restore_generator()

        for holder, name in empty:
            if isinstance(_attributes(holder).get(name), _Generator):
                setattr(holder, name, None)


def _restoring(generator: Any) -> Callable[[], Any]:
    """A function that sets a generator back to where it is now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)

    return partial(generator.set_state, generator.get_state())


def _reachable_from(loader: Any) -> list[Any]:
    """What a loader holds, directly and through what it holds.

    As far as attributes and closures show it.
    """
    found: list[Any] = []
    seen: set[int] = set()
    level = [loader]
    for _ in range(_DEPTH):
        following: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) > _MOST_SEEN:
                continue
            if isinstance(value, nn.Module | torch.Tensor | ModuleType | type | str | bytes):
                continue

            seen.add(id(value))
            found.append(value)
            following += _attributes(value).values()

        level = following

    return found


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds by name; of a container its items, of a function what it refers to."""
    if isinstance(value, MethodType):
        return {"self": value.__self__}

    if isinstance(value, FunctionType):
        with suppress(ValueError):  # a cell that is still empty
            names = inspect.getclosurevars(value)
            return {**names.globals, **names.nonlocals}

        return {}

    if isinstance(value, partial):
        return {
            "func": value.func,
            "args": value.args,
            "keywords": value.keywords,
        }

    if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        return {str(number): item for number, item in enumerate(value)}
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return {str(name): item for name, item in value.items()}

    return dict(getattr(value, "__dict__", {}))
