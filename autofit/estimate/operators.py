"""How long operators take on this machine's CPU, relative to the roofline.

A processor's rates say little about exponentials, random numbers, table look-ups or products of
small matrices. So the operators of a trace are called on real tensors, with a large and a small
micro-batch and rank if their shapes have one. A line through both gives the time of a call whatever
its size, and the factor of the roofline's seconds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from autofit.core.hardware import MIB
from autofit.estimate.known_values import on_real_tensors
from autofit.estimate.operator_costs import Cost
from autofit.estimate.rates import SIZE, Rates
from autofit.estimate.roofline import Speed, working_seconds
from autofit.estimate.scaling import Symbols

# Bytes of a call's tensors: memory for larger ones comes fresh from the system, which takes longer.
_LARGEST = 32 * MIB
_HARMLESS = ("aten", "bitsandbytes", "torchao")  # libraries whose operators only compute
# The first reads a workspace that made-up values are none of, and crashes; the second would compute
# empty groups.
_UNSAFE = ("aten::mkldnn_rnn_layer_backward", "aten::_grouped_mm")
_LEAST_SECONDS = 1e-6  # by the roofline: shorter calls are all launching
# Calls of one operator in a pass, of which the first ones are not timed.
_WARM = 1
_REPEATS = 3
_LONG = 5e-3  # seconds of all calls of one operator in a pass, after which it is not repeated
# Over all calls at most; two where the machine is as fast as it was when its rates were measured.
_PASSES = 4
# A product takes so many times as long as its rates say where other work shares the processor.
_DISTURBED = 1.5
# For the first two passes. Of tiny-llama's space 1, 2 and 3 seconds time what moves 83, 87 and 88 %
# of all bytes.
MEASURING_SECONDS = 1.5
# Micro-batch, rank, and tokens of a chunk of the loss.
_LARGE = (8, 64, 256)
_SMALL = (1, 8, 32)

# Factors beyond are disturbances.
_LEAST = 0.05
_MOST = 200.0


@dataclass(frozen=True)
class _Size:
    """Usual sizes in place of the primes that stand for them."""

    symbols: Symbols
    samples: int
    rank: int
    rows: int

    def of(self, traced: int) -> int:
        symbols = self.symbols
        scales = (
            (symbols.samples, self.samples),
            (symbols.rank, self.rank),
            (symbols.rows, self.rows),
        )
        for prime, size in scales:
            if traced % prime == 0:
                traced = traced // prime * size

        return traced


@dataclass(frozen=True)
class _Like:
    """The shape and format of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, size: _Size) -> Self:
        shape = torch.Size(map(size.of, self.shape))
        stride = tuple(map(size.of, self.stride))
        return type(self)(shape, stride, self.dtype)

    def tensor(self) -> torch.Tensor:
        """A tensor of small positive numbers, or of zeros, which are valid indices and classes."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(
            last + 1 if self.shape.numel() else 0,
            dtype=self.dtype,
        )

        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            flat.uniform_(0.1, 1.0)
        else:
            flat.zero_()

        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Call:
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cost: Cost

    def __reduce__(self) -> Any:  # operators cannot be pickled
        return _call, (str(self.func), self.args, self.kwargs, self.cost)

    def of(self, size: _Size) -> Self:
        args, kwargs = tree_map_only(
            _Like,
            lambda like: like.of(size),
            (self.args, self.kwargs),
        )
        flops = size.of(self.cost.flops)
        sizes = tuple(map(size.of, self.cost.sizes))
        cost = replace(self.cost, flops=flops, sizes=sizes)

        return replace(
            self,
            args=args,
            kwargs=kwargs,
            cost=cost,
        )


def _call(operator: str, *rest: Any) -> _Call:
    func: Any = reduce(
        getattr,
        operator.split("."),
        torch.ops,
    )

    return _Call(func, *rest)


class Calls:
    """The distinct calls of a trace, by operator, number format and sizes, and the bytes that each
    moves in total.

    Args:
        symbols: the primes that stand for other sizes; None: sizes are real.
    """

    def __init__(self, symbols: Symbols | None = None) -> None:
        self._symbols = symbols
        self._calls: dict[str, _Call] = {}
        self._bytes: dict[str, int] = {}

    def note(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        cost: Cost,
    ) -> None:
        """Add a call on fake tensors, without holding them."""
        key = cost.call
        self._bytes[key] = self._bytes.get(key, 0) + cost.nbytes
        harmless = cost.name.partition("::")[0] in _HARMLESS and cost.name not in _UNSAFE

        if key not in self._calls and cost.nbytes <= _LARGEST and harmless:
            given = args, dict(kwargs)
            args, kwargs = tree_map_only(torch.Tensor, _like, given)
            self._calls[key] = _Call(
                func,
                args,
                dict(kwargs),
                cost,
            )

    def add(self, others: Self) -> None:
        """The calls of another trace."""
        for key, nbytes in others._bytes.items():
            self._bytes[key] = self._bytes.get(key, 0) + nbytes

        for key, call in others._calls.items():
            self._calls.setdefault(key, call)

    def measured(
        self, rates: Rates, seconds: float = MEASURING_SECONDS
    ) -> dict[str, tuple[float, float]]:
        """By call: (seconds whatever its size, factor of the roofline's seconds).

        Launching is in neither. The largest call of an operator in one number format stands for its
        calls that are not measured: too large, or too unimportant for the time there is; without
        any, its largest in another format does. So each operator's largest is timed first. All are
        timed in passes, of which the shortest times count: other work disturbs for a while.
        """
        timed: dict[str, list[float | None]] = {}
        with on_real_tensors(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            calm = False
            for number in range(_PASSES):
                pace_before = _pace(rates)
                start = time.perf_counter()
                for key in list(timed) or self._by_importance():
                    took = [_seconds(call) if call else None for call in self._sizes_of(key, rates)]
                    before = timed.get(key, took)
                    timed[key] = [
                        min(a, b) if a and b else None for a, b in zip(before, took, strict=True)
                    ]
                    if not number and time.perf_counter() - start > seconds / 2:
                        break

                calm = calm or max(pace_before, _pace(rates)) < _DISTURBED
                if number and calm:
                    break

        lines: dict[str, tuple[float, float]] = {}
        for key, took in timed.items():
            line = self._line(key, rates, *took)
            if line is None:
                continue

            lines[key] = line
            cost = self._calls[key].cost
            lines.setdefault(cost.operator, line)
            lines.setdefault(cost.name, line)

        return lines

    def _by_importance(self) -> list[str]:
        """The calls by the bytes that each moves, but the largest of every operator before all
        others.

        By what is timed in 1.5 seconds, predicted steps of bert's space deviate by 3 % then, and by
        8 % in the order of bytes alone.
        """
        largest_first = sorted(
            self._calls,
            key=lambda key: -self._bytes[key],
        )
        firsts: dict[str, str] = {}
        for key in largest_first:
            firsts.setdefault(
                self._calls[key].cost.operator,
                key,
            )

        return list(dict.fromkeys([*firsts.values(), *largest_first]))

    def _sizes_of(self, key: str, rates: Rates) -> tuple[_Call | None, _Call | None]:
        """A call in a large size and in a small one, if its shapes have one; None: not to be
        timed."""
        large = self._calls[key]
        small = None
        if self._symbols:
            traced = large
            large = traced.of(_Size(self._symbols, *_LARGE))
            small = traced.of(_Size(self._symbols, *_SMALL))
            if small.cost.sizes == large.cost.sizes:
                small = None

        if working_seconds(large.cost, _roofline(rates)) < _LEAST_SECONDS:
            return None, None

        return large, small

    def _line(
        self,
        key: str,
        rates: Rates,
        took: float | None,
        less: float | None,
    ) -> tuple[float, float] | None:
        """(seconds whatever the size, factor of the roofline's seconds) of a call that took so
        many seconds in its large and its small size; None where it was not timed."""
        large, small = self._sizes_of(key, rates)
        if not took or not large:
            return None

        expected = working_seconds(large.cost, _roofline(rates))
        took = max(took - rates.launch_seconds, 0.0)
        if less and small:
            expected_less = working_seconds(small.cost, _roofline(rates))
            less = max(less - rates.launch_seconds, 0.0)
            factor = (took - less) / max(expected - expected_less, 1e-12)
            fixed = less - factor * expected_less
            if fixed > 0.0 and factor > _LEAST:
                return fixed, min(factor, _MOST)

        return 0.0, min(max(took / expected, _LEAST), _MOST)


def _like(tensor: torch.Tensor) -> _Like:
    return _Like(
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def _roofline(rates: Rates) -> Speed:
    return Speed(replace(rates, operators=None), asynchronous=False)


def _pace(rates: Rates) -> float:
    """How many times longer than its rates say the machine takes for a product now."""
    product = torch.ones(SIZE, SIZE)
    start = time.perf_counter()
    torch.matmul(product, product)

    return (time.perf_counter() - start) * rates.matmul["float32"] / (2 * SIZE**3)


def _seconds(call: _Call) -> float | None:
    """The shortest of a few real calls; None where a kernel refuses made-up values."""
    times: list[float] = []
    args, kwargs = tree_map_only(
        _Like,
        _Like.tensor,
        (call.args, call.kwargs),
    )
    for _ in range(_WARM + _REPEATS):
        start = time.perf_counter()
        try:
            call.func(*args, **kwargs)
        except Exception:  # whatever a kernel raises, of this library or another
            return None

        times.append(time.perf_counter() - start)
        if len(times) > _WARM and sum(times) > _LONG:
            break

    return min(times[_WARM:])
