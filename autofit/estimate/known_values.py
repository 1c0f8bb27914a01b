"""Values beside fakes: of a batch, of buffers, and of whatever is computed from such tensors alone.

Code reads numbers and shapes from them: which patches are an image's, which images are padding,
which labels count. Small ones are computed at once, as code may change them in place; others, such
as a causal mask or normalised pixels, when something reads them, which hardly anything does.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from autofit.estimate.operator_costs import tensors_in

# Elements that are computed at once.
_SMALL = 2**20  # of whole numbers
_FEW = 16  # of floats

# Layers are dropped by small numbers: none is, which takes the most memory.
_LARGEST_DRAW = 1 - 2**-24
_UNIFORM = ("aten::rand", "aten::rand_like", "aten::uniform", "aten::uniform_")

# That all numbers are finite, or any is none: nothing is wrong.
_CHECKS = {
    "aten::all": True,
    "aten::any": False,
    "aten::isnan": False,
    "aten::isinf": False,
}
CHOICES = ("aten::topk", "aten::argmax", "aten::max")

on_real_tensors = _disable_current_modes  # a context in which operators compute real values

_Read = Callable[[], torch.Tensor | None]


@dataclass(frozen=True)
class _Place:
    """Stands in for a tensor among the arguments of a call."""

    number: int


class _Memory:
    """What a tensor and its views share; `lost` once something unknown was written into it."""

    lost = False


class _Value:
    """A value, computed when it is first read.

    Attributes:
        memory: what it shares with other tensors.
        assumed: it follows from what was taken for granted.
        real: the value, once it was read.
    """

    def __init__(self, compute: _Read, memory: _Memory, *, assumed: bool = False) -> None:
        self._compute = compute
        self.memory = memory
        self.assumed = assumed
        self.real: torch.Tensor | None = None
        self._version = 0  # of the real one, when it was computed

    def read(self) -> torch.Tensor | None:
        """The value; None where it is lost."""
        if self.memory.lost:
            return None
        if self.real is None and (real := self._compute()) is not None:
            self.real = real
            self._version = real._version
            self._compute = _nothing  # what it was computed from is held no longer

        return self.real

    def as_of_now(self) -> _Read:
        """Reads the value of this moment; None once that was overwritten."""
        now = None
        if self.real is not None:
            now = self.real._version

        def read() -> torch.Tensor | None:
            real = self.read()
            if real is None:
                return None

            expected = self._version if now is None else now
            if real._version != expected:
                return None

            return real

        return read


def _nothing() -> None:
    return None


def know(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Remember the values of a real tensor; returns the fake."""
    fake.known_value = _of_real(real)  # type: ignore[attr-defined]
    return fake


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's values, where they are known."""
    value = _value(tensor)
    if value is None:
        return None

    return value.read()


def is_assumed(value: Any) -> bool:
    """Whether the values of a tensor, or of one among arguments, follow from what was taken for
    granted."""
    values = map(_value, tensors_in(value))
    return any(known.assumed for known in values if known)


def computed(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of known values; None where one of them is not."""
    reads = [functools.partial(value_of, tensor) for tensor in tensors_in(args, kwargs)]
    return _call(func, args, kwargs, reads)()


def follow(
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    result: Any,
) -> None:
    """Give an operator's results their values, where those of the given tensors, its inputs, are
    known."""
    name, is_mutable, draws, is_empty = _facts(func)
    unknown = any(_value(tensor) is None for tensor in given)
    # What is filled later and read are sizes, level by level; what is large holds bytes of weights.
    if is_empty and (result.is_floating_point() or result.numel() > _SMALL):
        unknown = True
    if unknown and not is_mutable and name not in _CHECKS:  # nearly every operator
        return

    inputs = [_value(tensor) for tensor in given]
    values = [value for value in inputs if value]
    results = tensors_in(result)
    written = []
    if is_mutable:
        written = list(_written(func, args, kwargs))

    # What follows from assumed values is many tensors, of which hardly any is read.
    assumed = any(value.assumed for value in values)
    at_once = bool(written) or (not assumed and all(map(_is_small, results)))
    unknown = unknown or (draws and not at_once)
    if written and not unknown and sum(tensor.numel() for tensor in given) <= _SMALL:
        for value in filter(None, written):
            value.read()

    if unknown or any(value and value.real is None for value in written):
        for value in filter(None, written):
            value.memory.lost = True
        if name in _CHECKS and results[0].numel() == 1:
            with on_real_tensors():
                know(results[0], torch.full(results[0].shape, _CHECKS[name]))

        return

    shared = None
    if values and (written or func.is_view):
        shared = values[0].memory

    plain = func
    if draws:
        plain = _drawn(func)
    elif is_empty:
        plain = _zeroed(func)

    call = _call(
        plain,
        args,
        kwargs,
        [value.as_of_now() for value in values],
    )

    # Once for all results, which are many where rows are taken apart.
    parts = functools.cache(functools.partial(_parts, call))
    if at_once:
        parts()

    for position, fake in enumerate(results):
        compute = functools.partial(_part, parts, position)
        value = _Value(
            compute,
            shared or _Memory(),
            assumed=assumed,
        )
        fake.known_value = value  # type: ignore[attr-defined]
        if at_once:
            value.read()


@functools.cache
def _facts(func: Any) -> tuple[str, bool, bool, bool]:
    """An operator's name, whether it writes into its arguments, draws random numbers, or leaves its
    result empty."""
    name = func._schema.name
    draws = torch.Tag.nondeterministic_seeded in func.tags

    return name, func._schema.is_mutable, draws, "empty" in name


def spread_evenly(
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    result: Any,
    samples: int,
) -> None:
    """Let what unknown scores choose, as the experts of a token, be all choices equally often: an
    operator of CHOICES.

    Args:
        samples: whose rows choose alike, so that counts grow with them.
    """
    chosen = tensors_in(result)[-1]
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dim = given.get("dim", -1)

    if (
        dim is None
        or not chosen.dim()
        or chosen.dtype.is_floating_point
        or chosen.numel() > _SMALL
        or _value(chosen)
    ):
        return

    scores = given["self"]
    keeps = scores.dim() == chosen.dim()
    with_dim = chosen if keeps else chosen.unsqueeze(dim)
    shape = with_dim.movedim(dim, -1).shape
    with on_real_tensors():
        rows = torch.arange(shape[:-1].numel())
        alike = samples if not len(rows) % samples else 1
        rows = rows.div(alike, rounding_mode="floor")
        numbers = (rows[:, None] * shape[-1] + torch.arange(shape[-1])) % scores.shape[dim]

        real = numbers.reshape(shape).movedim(-1, dim)
        known = know(chosen, real.contiguous() if keeps else real.squeeze(dim))
        known.known_value.assumed = True  # type: ignore[attr-defined]


def _value(tensor: torch.Tensor) -> _Value | None:
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_meta else _of_real(tensor)

    value: _Value | None = getattr(tensor, "known_value", None)
    return value if value and not value.memory.lost else None


def _of_real(tensor: torch.Tensor) -> _Value:
    value = _Value(lambda: tensor, _Memory())
    value.read()
    return value


def _is_small(tensor: torch.Tensor) -> bool:
    most = _FEW if tensor.is_floating_point() else _SMALL
    return tensor.numel() <= most


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[_Value | None]:
    """The values of the tensors that an operator writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from map(_value, tensors_in(given))


def _call(
    func: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    reads: Sequence[_Read],
) -> Callable[[], Any]:
    """Calls an operator with what is read for its tensors, and holds none of these; None where a
    value is lost."""
    numbers = itertools.count()
    places = args, dict(kwargs)
    if reads:
        places = tree_map_only(
            torch.Tensor,
            lambda _: _Place(next(numbers)),
            places,
        )

    def call() -> Any:
        reals = [read() for read in reads]
        if any(real is None for real in reals):
            return None

        args, kwargs = places
        if reals:
            args, kwargs = tree_map_only(
                _Place,
                lambda place: reals[place.number],
                places,
            )

        with on_real_tensors(), torch.no_grad():
            return func(*args, **kwargs)

    return call


def _parts(call: Callable[[], Any]) -> list[Any] | None:
    """What a call makes, as a list; None where it makes nothing."""
    made = call()
    if made is None:
        return None

    return list(tree_iter(made))


def _part(parts: Callable[[], list[Any] | None], position: int) -> torch.Tensor | None:
    made = parts()
    return None if made is None else made[position]


def _zeroed(func: Any) -> Callable[..., Any]:
    """Makes zeros of what is to be filled: sizes, level by level."""
    return lambda *args, **kwargs: func(*args, **kwargs).zero_()


def _drawn(func: Any) -> Callable[..., Any]:
    """Draws the same random numbers in every trace."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            drawn = func(*args, **kwargs)

        if func._schema.name in _UNIFORM and drawn.numel() == 1:
            drawn.fill_(_LARGEST_DRAW)
        return drawn

    return draw
