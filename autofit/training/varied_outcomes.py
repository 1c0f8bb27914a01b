"""Outcomes that other weights and other data would give, for comparisons of gradients.

A loss may select by its own outputs (`loss[loss > 0.7].mean()`), bend where they pass a limit (`(loss - b).abs()`), or
look up the weights of classes. With random weights and few samples, all may lie on one side of the limit, and all
classes have one weight: nothing shows then that such a loss couples its samples. So limits are moved into the middle of
what is compared, bends are rounded and the entries of tables told apart, alike in all passes of a proof.
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
_IS_SMALLER = ("lt", "le", "eq", "less", "less_equal", "__lt__", "__le__", "__eq__")
_ARE_ZERO = ("nonzero", "argwhere", "count_nonzero", "bool")
_DISTANCES = ("l1_loss", "smooth_l1_loss", "huber_loss")
_ARE_CHOICES = ("eq", "__eq__", "ne", "__ne__", "not_equal")  # of whole numbers
_LOOKUPS = ("__getitem__", "index_select", "gather", "take")
_OF_CLASSES = ("cross_entropy", "nll_loss")  # whose third argument weighs classes
_OF_MARGINS = ("triplet_margin_loss", "margin_ranking_loss", "hinge_embedding_loss")
_FAR = 1e3  # a margin within which all samples are
_LOOKED_AT = 4096  # of the compared numbers, among which the middle is found


class VariedOutcomes(TorchFunctionMode):
    """Moves limits, rounds bends and spreads tables. The first pass decides about the limits. With `scalars`, numbers
    of a whole batch are larger than what they are compared with in one later pass, and smaller in the next."""

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
        output = self._call(func, name, args, kwargs, origin)
        if origin:
            for tensor in _tensors_in((output,)):
                if not tensor.requires_grad:  # which tells where it comes from itself
                    self._origins[tensor] = origin
        return output

    def _origin(self, tensor: torch.Tensor) -> int:
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
        if (
            name in _LOOKUPS
            and len(args) > 1
            and self._is_table(args[0])
            and _holds_indices(args[-1])
        ):
            return func(_spread(args[0]), *args[1:], **kwargs)
        if origin and name in (*_IS_LARGER, *_IS_SMALLER) and len(args) == 2 and _is_float(args[0]):
            outcome = self._is_larger(args[0] - args[1])
            return (
                func(*args, **kwargs)
                if outcome is None
                else outcome
                if name in _IS_LARGER
                else ~outcome
            )
        if not origin & _WEIGHTS:
            return func(*args, **kwargs)
        if (
            name in _ARE_CHOICES
            and len(args) == 2
            and isinstance(args[0], torch.Tensor)
            and not _is_float(args[0])
        ):
            return self._chosen(func(*args, **kwargs))

        if name in _OF_CLASSES and self._is_table(kwargs.get("weight")):
            return func(*args, **{**kwargs, "weight": _spread(kwargs["weight"])})
        if name in _OF_CLASSES and len(args) > 2 and self._is_table(args[2]):
            return func(*args[:2], _spread(args[2]), *args[3:], **kwargs)
        if name in _OF_MARGINS and "margin" in kwargs:
            return func(*args, **{**kwargs, "margin": _FAR})
        if (
            name in _ARE_ZERO
            and _is_float(args[0])
            and (outcome := self._is_larger(args[0])) is not None
        ):
            return func(outcome, *args[1:], **kwargs)
        if name == "sign" and (outcome := self._is_larger(args[0])) is not None:
            return func(outcome.to(args[0].dtype))
        if name == "topk" and len(args) == 2 and not kwargs and args[1] == args[0].shape[-1] > 1:
            return func(args[0], args[1] - 1)  # as where there are more

        rounded = _rounded(name, args, kwargs)
        return func(*args, **kwargs) if rounded is None else rounded

    def _is_table(self, table: Any) -> bool:
        """Whether it is a list of constants, which come neither from data nor from weights."""
        return _is_float(table) and table.dim() == 1 and not self._origin(table)

    def _chosen(self, natural: torch.Tensor) -> torch.Tensor:
        """A choice, as of the likeliest class, is drawn, since random weights may choose one class for all samples."""
        if not natural.dim():
            return natural
        return torch.rand(natural.shape, device=natural.device) < 0.5

    def _is_larger(self, difference: torch.Tensor) -> torch.Tensor | None:
        """Where it is above a limit that about half of its numbers in the first pass are above; None without one."""
        difference = difference.detach()
        if self._passes == 1:
            self._limits.append(_middle(difference) if difference.dim() else None)
        number = self._number
        self._number += 1
        if number >= len(self._limits):  # a loop until something is reached
            return None
        if not difference.dim() and self._scalars and self._passes > 1:
            return torch.full_like(difference, self._passes % 2, dtype=torch.bool)
        limit = self._limits[number]
        return None if limit is None else difference > limit


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
    """A table of as many numbers of the same range, all of which differ, unless those given are all the same."""
    if table.numel() < 2 or bool((table == table[0]).all()) or not bool(table.isfinite().all()):
        return table
    least = float(table.min())
    most = float(table.max())
    return torch.linspace(least, most, len(table), dtype=table.dtype, device=table.device)


def _middle(numbers: torch.Tensor) -> float | None:
    """A number in the widest gap in the middle half of these, with two on each side if there are four; None where they
    do not differ."""
    flat = numbers.flatten()
    flat = flat[:: max(1, flat.numel() // _LOOKED_AT)]
    values = flat[flat.isfinite()].double().unique()
    if len(values) < 2:
        return None
    first = max((len(values) - 1) // 4, int(len(values) > 3))
    gaps = values.diff()[first : len(values) - 1 - first]
    place = first + int(gaps.argmax())
    return float(values[place] + values[place + 1]) / 2


def _rounded(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The value of a function with a bend, without it; None of any other. Numbers that are bounded on both sides may
    be meant for a function that takes no others, so of these the single one alone is rounded."""
    x = args[0]
    if not _is_float(x) or not x.requires_grad:
        return None
    is_single = not x.dim()
    if is_single and name in ("abs", "__abs__"):
        return _distance(x)
    if is_single and name in _DISTANCES:
        return _distance(x - args[1])
    if (
        name in ("max", "maximum", "min", "minimum")
        and is_single
        and len(args) == 2
        and _is_float(args[1])
    ):
        other = args[1]
        return _at_least(x, other) if name.startswith("max") else _at_most(x, other)

    low, high = _bounds(name, args, kwargs)
    if (low is None and high is None) or (low is not None and high is not None and not is_single):
        return None
    if low is not None:
        x = _at_least(x, low)
    return x if high is None else _at_most(x, high)


def _distance(x: torch.Tensor) -> torch.Tensor:
    return softplus(x) + softplus(-x)


def _at_least(x: torch.Tensor, low: Any) -> torch.Tensor:
    rounded: torch.Tensor = softplus(x - low) + low
    return rounded


def _at_most(x: torch.Tensor, high: Any) -> torch.Tensor:
    rounded: torch.Tensor = high - softplus(high - x)
    return rounded


def _bounds(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    given = args[1] if len(args) > 1 else None
    if name == "clamp_min":
        return kwargs.get("min", given), None
    if name == "clamp_max":
        return None, kwargs.get("max", given)
    if name in ("clamp", "clip"):
        return kwargs.get("min", given), kwargs.get("max", args[2] if len(args) > 2 else None)
    return None, None
