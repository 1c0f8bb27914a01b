"""Imports before the zygote forks, without opening CUDA there: the driver does not survive a fork.

Some libraries ask at their import what card there is, to define kernels for it (torchao, which transformers imports).
Until the imports are done they are told what a forked child saw, which ends before the first job is run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from autofit.core.environment import die_with_parent


@dataclass(frozen=True)
class _Seen:
    """What a child saw: how many cards, and the properties of card 0, None where it cannot be opened."""

    cards: int = 1
    properties: SimpleNamespace | None = None

    @property
    def fine(self) -> bool:
        return not self.cards or self.properties is not None


def preload(names: Sequence[str]) -> bool:
    """Import modules; returns whether children forked from now on can use what this machine computes on.

    Whether there is a card is asked in a child, too: asking opens CUDA without NVML, and of instances of a card (MIG).
    """
    seen = _asked_in_a_child()
    with _told_of(seen):
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:
                if seen().fine:
                    raise
                traceback.print_exc()  # to the log; the one who asked for the card is told by its probe
                return False
    return seen().fine and not torch.cuda.is_initialized()


@contextlib.contextmanager
def _told_of(seen: Callable[[], _Seen]) -> Iterator[None]:
    """Inside, questions about cards are answered by what the child saw."""
    real = torch.cuda.get_device_properties

    def properties(device: Any = None) -> Any:
        return seen().properties or real(device)  # of a single card: workers on several have one each

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: seen().cards > 0),
        mock.patch.object(torch.cuda, "device_count", lambda: seen().cards),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield
    interface = sys.modules.get("torch._dynamo.device_interface")
    getattr(interface, "caching_worker_device_properties", {}).clear()  # it keeps answers; children ask the card itself


def _asked_in_a_child() -> Callable[[], _Seen]:
    """A function that says what a child sees, which opens card 0 meanwhile."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _describe(writer)
    os.close(writer)

    @functools.cache
    def answer() -> _Seen:
        with os.fdopen(reader, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        return pickle.loads(told) if told else _Seen()

    return answer


def _describe(writer: int) -> NoReturn:
    try:
        die_with_parent()
        seen = _Seen(cards=0)
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            public = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
            plain = {name: value for name, value in public.items() if isinstance(value, int | float | str)}
            seen = _Seen(torch.cuda.device_count(), SimpleNamespace(**plain))
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(seen, pipe)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
