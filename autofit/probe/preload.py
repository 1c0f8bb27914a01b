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
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from autofit.core.orphans import die_with_parent


def preload(names: Sequence[str]) -> bool:
    """Import modules; returns whether children forked from now on can use what this machine computes on."""
    if not torch.cuda.is_available():  # answered by NVML, which the parent asks for; nothing is opened
        for name in names:
            importlib.import_module(name)
        return True
    card = _asked_in_a_child()
    with _told_of(card):
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:
                if card() is not None:
                    raise
                traceback.print_exc()  # to the log; the one who asked for the card is told by its probe
                return False
    return card() is not None and not torch.cuda.is_initialized()


@contextlib.contextmanager
def _told_of(card: Any) -> Iterator[None]:
    """Inside, questions about the card are answered by what the child saw."""
    real = torch.cuda.get_device_properties

    def properties(device: Any = None) -> Any:
        return card() or real(device)  # of a single card: workers on several have one each

    with (
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield
    interface = sys.modules.get("torch._dynamo.device_interface")
    getattr(interface, "caching_worker_device_properties", {}).clear()  # it keeps answers; children ask the card itself


def _asked_in_a_child() -> Any:
    """A function that says what a child sees of card 0, which opens it meanwhile; None where it cannot be opened."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _describe(writer)
    os.close(writer)

    @functools.cache
    def answer() -> SimpleNamespace | None:
        with os.fdopen(reader, "rb") as pipe:
            seen = pipe.read()
        os.waitpid(child, 0)
        return SimpleNamespace(**pickle.loads(seen)) if seen else None

    return answer


def _describe(writer: int) -> NoReturn:
    try:
        die_with_parent()
        properties = torch.cuda.get_device_properties(0)
        public = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
        plain = {name: value for name, value in public.items() if isinstance(value, int | float | str)}
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(plain, pipe)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
