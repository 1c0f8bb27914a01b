"""Outcomes that other weights and other data would give, for comparisons of gradients.

A loss may select by its own outputs (`loss[loss > 0.7].mean()`), bend where they pass a limit
(`(loss - b).abs()`), or look up the weights of classes. With random weights and few samples, all
may lie on one side of the limit, and all classes have one weight: nothing shows then that such a
loss couples its samples. So limits are moved into the middle of what is compared, bends are rounded
and the entries of tables told apart, alike in all passes of a proof.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.data.batch import tensors

_WEIGHTS = 1  # what a tensor was computed from, as bits
_DATA = 2
_IS_LARGER = (
    "gt",
    "ge",
    "ne",
    "greater",
    "greater_equal",
    "not_equal",
    "__gt__",
    "__ge__",
    "__ne__",
)
_IS_SMALLER = (
    "lt",
    "le",
    "eq",
    "less",
    "less_equal",
    "__lt__",
    "__le__",
    "__eq__",
)
_COMPARISONS = _IS_LARGER + _IS_SMALLER
_ARE_ZERO = ("nonzero", "argwhere", "count_nonzero", "bool")
_DISTANCES = ("l1_loss", "smooth_l1_loss", "huber_loss")
_ARE_CHOICES = ("eq", "__eq__", "ne", "__ne__", "not_equal")  # of whole numbers
_LOOKUPS = ("__getitem__", "index_select", "gather", "take")
_OF_CLASSES = ("cross_entropy", "nll_loss")  # whose third argument weighs classes
_WITH_MARGIN = ("triplet_margin_loss", "margin_ranking_loss", "hinge_embedding_loss")
_FAR = 1e3  # a margin within which all samples are
_LOOKED_AT = 4096  # of the compared numbers, among which the middle is found


class VariedOutcomes(TorchFunctionMode):
    """Moves limits, rounds bends and spreads tables. The first pass decides about the limits.

    With `scalars`, numbers of a whole batch are larger than what they are compared with in one
    later pass, and smaller in the next.
    """

    def __init__(self, *, scalars: bool) -> None:
        super().__init__()
        self._scalars = scalars
        self._passes = 0
        # of the comparisons of the first pass, in their order
        self._limits: list[float | None] = []
        self._number = 0
        self._origins: Any = WeakTensorKeyDictionary()

    def begin(self, batch: Any) -> None:
        """The next pass is over this batch."""
        self._passes += 1
        self._number = 0
        for tensor in tensors(batch):
            self._origins[tensor] = _DATA

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            return func(*args, **kwargs)

        origin = 0
        for tensor in _tensors_in((*args, *kwargs.values())):
            origin |= self._origin(tensor)

        output = self._call(
            func,
            name,
            args,
            kwargs,
            origin,
        )

        if origin:
            for tensor in _tensors_in((output,)):
                if not tensor.requires_grad:  # which tells where it comes from itself
                    self._origins[tensor] = origin

        return output

    def _origin(self, tensor: torch.Tensor) -> int:
        """What a tensor was computed from, as far as that was seen."""
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return _WEIGHTS

        known: int = self._origins.get(tensor, 0)

        return known

    def _call(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: int,
    ) -> Any:
        """Call a function with arguments, or with an outcome, that other data would give."""
        x: Any = args[0] if args else None
        others = args[1:]

        if name in _LOOKUPS and others and self._is_table(x) and _holds_indices(others[-1]):
            return func(
                _spread(x),
                *others,
                **kwargs,
            )

        if origin and name in _COMPARISONS and len(args) == 2 and _is_float(x):
            is_larger = self._is_larger(x - args[1])
            if is_larger is None:
                return func(*args, **kwargs)
            return is_larger if name in _IS_LARGER else ~is_larger

        if not origin & _WEIGHTS:
            return func(*args, **kwargs)

        holds_whole = isinstance(x, torch.Tensor) and not _is_float(x)
        if name in _ARE_CHOICES and len(args) == 2 and holds_whole:
            return _random_choice(func(*args, **kwargs))

        if name in _OF_CLASSES:
            table: Any = kwargs.get("weight")
            if self._is_table(table):
                kwargs = kwargs | {"weight": _spread(table)}
                return func(*args, **kwargs)

            if len(args) > 2 and self._is_table(args[2]):
                outputs, targets, table, *rest = args
                return func(
                    outputs,
                    targets,
                    _spread(table),
                    *rest,
                    **kwargs,
                )

        if name in _WITH_MARGIN and "margin" in kwargs:
            kwargs = kwargs | {"margin": _FAR}
            return func(*args, **kwargs)

        if name == "sign" or (name in _ARE_ZERO and _is_float(x)):
            is_larger = self._is_larger(x)
            if is_larger is not None:
                if name == "sign":
                    is_larger = is_larger.to(x.dtype)
                return func(is_larger, *others, **kwargs)

        if name == "topk" and len(args) == 2 and not kwargs and args[1] == x.shape[-1] > 1:
            return func(x, args[1] - 1)  # as where there are more

        rounded = _rounded(name, args, kwargs)
        if rounded is None:
            return func(*args, **kwargs)

        return rounded

    def _is_table(self, table: Any) -> bool:
        """Whether it is a list of constants, which come neither from data nor from weights."""
        return _is_float(table) and table.dim() == 1 and not self._origin(table)

    def _is_larger(self, difference: torch.Tensor) -> torch.Tensor | None:
        """Where it is above a limit; None without one.

        Of its numbers in the first pass, about half are above the limit.
        """
        difference = difference.detach()
        is_scalar = not difference.dim()
        if self._passes == 1:
            self._limits.append(None if is_scalar else _middle(difference))

        number = self._number
        self._number += 1
        if number >= len(self._limits):  # a loop until something is reached
            return None

        if is_scalar and self._scalars and self._passes > 1:
            return torch.full_like(
                difference,
                self._passes % 2,
                dtype=torch.bool,
            )

        limit = self._limits[number]
        if limit is None:
            return None

        return difference > limit


def _random_choice(natural: torch.Tensor) -> torch.Tensor:
    """Draw a choice, as of the likeliest class.

    Random weights may choose one class for all samples.
    """
    if not natural.dim():
        return natural
    return torch.rand(natural.shape, device=natural.device) < 0.5


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _holds_indices(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def _spread(table: torch.Tensor) -> torch.Tensor:
    """A table of as many numbers of the same range, all of which differ.

    One whose numbers are all the same stays as it is.
    """
    if table.numel() < 2 or bool((table == table[0]).all()):
        return table
    if not bool(table.isfinite().all()):
        return table

    least = float(table.min())
    most = float(table.max())

    return torch.linspace(
        least,
        most,
        len(table),
        dtype=table.dtype,
        device=table.device,
    )


def _middle(numbers: torch.Tensor) -> float | None:
    """A number in the widest gap in the middle half of these; None where they do not differ.

    If there are four numbers, two are on each side of it.
    """
    flat = numbers.flatten()
    every = max(1, flat.numel() // _LOOKED_AT)
    flat = flat[::every]
    values = flat[flat.isfinite()].double().unique()
    if len(values) < 2:
        return None

    gaps = values.diff()
    first = len(gaps) // 4
    if len(gaps) > 2:
        first = max(first, 1)

    middle = gaps[first : len(gaps) - first]

    place = first + int(middle.argmax())
    return float(values[place] + values[place + 1]) / 2


def _rounded(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The value of a function with a bend, without the bend; None of any other function.

    Numbers that are bounded on both sides may be meant for a function that takes no others, so of
    these the single one alone is rounded.
    """
    x: torch.Tensor = args[0]
    if not _is_float(x) or not x.requires_grad:
        return None

    is_single = not x.dim()
    if is_single and name in ("abs", "__abs__"):
        return _distance(x)
    if is_single and name in _DISTANCES:
        return _distance(x - args[1])

    low, high = _bounds(name, args, kwargs)
    if is_single and len(args) == 2 and _is_float(args[1]):
        if name in ("max", "maximum"):
            low = args[1]
        if name in ("min", "minimum"):
            high = args[1]

    if low is None and high is None:
        return None
    if low is not None and high is not None and not is_single:
        return None

    if low is not None:
        x = softplus(x - low) + low
    if high is not None:
        x = high - softplus(high - x)

    return x


def _distance(x: torch.Tensor) -> torch.Tensor:
    """The absolute value without its bend."""
    return softplus(x) + softplus(-x)


def _bounds(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The lowest and the highest value that a function gives."""
    first, second, *_ = (*args[1:], None, None)
    if name == "clamp_min":
        return kwargs.get("min", first), None
    if name == "clamp_max":
        return None, kwargs.get("max", first)
    if name in ("clamp", "clip"):
        return kwargs.get("min", first), kwargs.get("max", second)

    return None, None
