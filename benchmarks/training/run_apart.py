"""Scripts and commands run as users run them, each in a child of a LocalExecutor: it has imported what they import."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from autofit import cli
from autofit.hardware.tracker import StorageTracker

_RATE = re.compile(r"([\d,]+) tokens/s")


@dataclass(frozen=True)
class Ran:
    """What a run printed, and the peak of its tensors where that was asked for."""

    stdout: str
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        """The median that a train.py printed, its first two steps left out."""
        return statistics.median(
            float(rate.replace(",", "")) for rate in _RATE.findall(self.stdout)[2:]
        )


def script(_: None, path: str, arguments: Sequence[str], counted: str | None = None) -> Ran:
    """`python PATH ARGUMENTS`; `counted`: the device whose peak is wanted, counted as a probe does."""
    return _ran(lambda: runpy.run_path(path, run_name="__main__"), [path, *arguments], counted)


def command(_: None, arguments: Sequence[str], counted: str | None = None) -> Ran:
    """`autofit ARGUMENTS`."""
    return _ran(lambda: cli.main(list(arguments)), ["autofit", *arguments], counted)


def _ran(run: Callable[[], Any], words: list[str], counted: str | None) -> Ran:
    printed = io.StringIO()
    tracker = StorageTracker() if counted == "cpu" else None
    with (
        mock.patch.object(sys, "argv", words),
        contextlib.redirect_stdout(printed),
        tracker or contextlib.nullcontext(),
    ):
        try:
            run()
        except SystemExit as done:
            if done.code:
                raise
    peak = torch.cuda.max_memory_allocated() if counted == "cuda" else tracker and tracker.peak
    return Ran(printed.getvalue(), peak)
