"""Imports before the zygote forks, without opening CUDA there: the driver does not survive a fork.

Some libraries ask for the card when they are imported, to define kernels for it (torchao, which
transformers imports). During the imports the answers come from a forked child, which ends before
the first job.
"""

import contextlib
import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from autofit.core.forks import forked

_NEEDED = ("autofit.probe.measure",)  # by every probe; not every one needs transformers or peft


@dataclass(frozen=True)
class _Cards:
    """The number of cards, and the properties of card 0, None where it cannot be opened."""

    count: int = 1
    properties: SimpleNamespace | None = None

    @property
    def usable(self) -> bool:
        return not self.count or self.properties is not None


def preload(names: Sequence[str]) -> bool:
    """Import modules; returns whether children forked from now on can use the device.

    The child also finds out whether there is a card: asking opens CUDA without NVML, and for MIG
    instances of a card.
    """
    found = forked(_described_card)

    @functools.cache
    def cards() -> _Cards:
        try:
            return found()
        except EOFError:
            return _Cards()

    with _answering(cards):
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:
                if name in _NEEDED and cards().usable:
                    raise

                # To the log: a probe that needs the package, or the card, reports it.
                traceback.print_exc()
                if not cards().usable:
                    return False
    return cards().usable and not torch.cuda.is_initialized()


@contextlib.contextmanager
def _answering(cards: Callable[[], _Cards]) -> Iterator[None]:
    """Inside, torch answers questions about cards with what the child found."""
    real = torch.cuda.get_device_properties

    def properties(device: Any = None) -> Any:
        # Only those of card 0: each worker sees a card of its own.
        return cards().properties or real(device)

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: cards().count > 0),
        mock.patch.object(torch.cuda, "device_count", lambda: cards().count),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield

    interface = sys.modules.get("torch._dynamo.device_interface")
    # A cache of these answers: children ask the card itself.
    getattr(interface, "caching_worker_device_properties", {}).clear()


def _described_card() -> _Cards:
    if not torch.cuda.is_available():
        return _Cards(count=0)

    properties = torch.cuda.get_device_properties(0)
    plain = {}
    for name in dir(properties):
        if not name.startswith("_"):
            value = getattr(properties, name)
            if isinstance(value, int | float | str):
                plain[name] = value
    return _Cards(torch.cuda.device_count(), SimpleNamespace(**plain))
