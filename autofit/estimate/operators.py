"""How long operators take on the CPU at hand, beside what their arithmetic and their traffic say.

A processor's rates say little of exponentials, random numbers, a table look-up for each element or a convolution of one
image. So the operators of a trace are called for real, each once with the shapes it was traced with, and what they took
more (or less) than the roofline is kept as a factor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from autofit.core.hardware import MIB
from autofit.estimate.costs import Cost
from autofit.estimate.rates import Rates
from autofit.estimate.scaling import ONE, UNSCALED
from autofit.estimate.seconds import Speed, Work

_LARGEST = 16 * MIB  # of all tensors of a call: memory for larger ones comes fresh from the system, which takes longer
_LEAST_SECONDS = 2e-5  # by the roofline: of shorter calls the clock tells little
_WARM, _REPEATS, _MOST_SECONDS = 2, 5, 5.0  # calls of one operator; seconds for all of them
_LEAST, _MOST = 0.1, 100.0  # factors beyond are a disturbance


@dataclass(frozen=True)
class _Like:
    """What a tensor was like."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """One like it: small positive numbers, or zeros, which are valid as places and as classes."""
        far = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(far + 1 if self.shape.numel() else 0, dtype=self.dtype)
        wide = self.dtype.is_floating_point and self.dtype.itemsize > 1
        return (flat.uniform_(0.1, 1.0) if wide else flat.zero_()).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Call:
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cost: Cost


class Calls:
    """Of each operator and number format the largest call that was traced, and how often its bytes were moved."""

    def __init__(self) -> None:
        self._largest: dict[str, _Call] = {}
        self._bytes: dict[str, int] = {}

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], cost: Cost) -> None:
        """One more call, on fake tensors, of which nothing is held."""
        key = cost.key
        self._bytes[key] = self._bytes.get(key, 0) + cost.nbytes
        known = self._largest.get(key)
        if cost.nbytes <= _LARGEST and (known is None or cost.nbytes > known.cost.nbytes):
            some, named = tree_map_only(torch.Tensor, _like, (args, dict(kwargs)))
            self._largest[key] = _Call(func, some, named, cost)

    def factors(self, rates: Rates) -> dict[str, float]:
        """How many times longer than the roofline says each operator takes here; those that matter most come first."""
        speed, factors = Speed(rates, asynchronous=False), dict[str, float]()
        start = time.perf_counter()
        for key in sorted(self._largest, key=lambda key: -self._bytes[key]):
            call = self._largest[key]
            took = Work.of([call.cost], ONE, UNSCALED).seconds(speed)
            expected = sum(float(each[0]) for name, each in took.items() if name != "launch")
            measured = _seconds(call) if expected >= _LEAST_SECONDS else None
            if measured:
                factors[key] = min(max((measured - rates.launch_seconds) / expected, _LEAST), _MOST)
            if time.perf_counter() - start > _MOST_SECONDS:
                break
        return factors


def _like(tensor: torch.Tensor) -> _Like:
    return _Like(tensor.shape, tensor.stride(), tensor.dtype)


def _seconds(call: _Call) -> float | None:
    """The median of a few real calls; None where made-up values, or what a real kernel asks for, forbid them."""
    times: list[float] = []
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map_only(_Like, _Like.tensor, (call.args, call.kwargs))
        for _ in range(_WARM + _REPEATS):
            start = time.perf_counter()
            try:
                call.func(*args, **kwargs)
            except Exception:  # whatever a kernel raises, of this library or another
                return None
            times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM:])
