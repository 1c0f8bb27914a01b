"""Random draws of one pass over a batch, replayed when its samples are passed one by one.

A loss with noise or dropout has the same value whole and in slices only for the same draws. Seeds
do not give them: the draws of several operators interleave. So the values that random operators
return are recorded, and each later pass gets the rows of its own samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_UNTAGGED = ("aten::random_",)  # draws, although PyTorch does not mark it
_FUSED = (
    "scaled_dot_product",
    "efficient_attention",
    "flash_attention",
    "rnn",
    "lstm",
    "gru",
)
_MASKED = "aten::native_dropout"  # returns its input with some elements dropped, and which ones


class UnprovableDrawError(Exception):
    """A draw that cannot be replayed for single samples."""


class RecordedDraws(TorchDispatchMode):
    """Records the random values of a pass over `samples` samples, then replays them for some.

    A draw whose shape does not depend on the number of samples belongs to no sample. Training would
    draw it again for each micro-batch. So it gets extreme values in later passes, its smallest and
    its largest by turns: where a loss depends on it, gradients show that.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples
        self._chosen: Sequence[int] | None = None  # None while recording
        self._values: list[torch.Tensor] = []
        self._dims: dict[int, int] = {}  # the dimension of samples, by the number of the draw
        self._number = 0
        self._passes = 0
        self.saw_single_precision = False  # whether any operator returned numbers of fp32 or less

    def replay(self, chosen: Sequence[int]) -> None:
        """Give the next pass, over these samples, the values that were drawn for them."""
        self._chosen = list(chosen)
        self._number = 0
        self._passes += 1

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        is_float = isinstance(output, torch.Tensor) and output.is_floating_point()
        if is_float and output.dtype != torch.float64:
            self.saw_single_precision = True

        name = func._schema.name  # type: ignore[attr-defined]
        is_tagged = torch.Tag.nondeterministic_seeded in func.tags  # type: ignore[attr-defined]
        if not is_tagged and name not in _UNTAGGED:
            return output

        if any(part in name for part in _FUSED):
            if _drops(func, args, kwargs):
                raise UnprovableDrawError(f"{name} draws random numbers that cannot be seen")
            return output

        if name == _MASKED:
            values, chance, *_ = args
            kept = self._value(output[1])
            return values * kept / max(1 - chance, 1e-9), kept

        if isinstance(output, tuple):
            raise UnprovableDrawError(f"{name} draws random numbers in a form that is not known")

        value = self._value(output)
        if value is not output:
            output.copy_(value)

        return output

    def _value(self, drawn: torch.Tensor) -> torch.Tensor:
        """The value that this draw shall have."""
        number = self._number
        self._number += 1

        if self._chosen is None:
            self._values.append(drawn.detach().clone())
            return drawn

        if number >= len(self._values):
            raise UnprovableDrawError(
                "single samples draw more random numbers than a batch of them"
            )

        recorded = self._values[number]
        dim = self._sample_dim(number, recorded.shape, drawn.shape)
        if dim is None:
            return _extreme(
                recorded,
                drawn,
                largest=self._passes % 2 == 0,
            )

        rows = recorded.shape[dim] // self._samples
        indices: list[int] = []
        for sample in self._chosen:
            indices += range(sample * rows, (sample + 1) * rows)

        index = torch.tensor(indices, device=recorded.device)

        return recorded.index_select(dim, index).view_as(drawn)

    def _sample_dim(self, number: int, whole: torch.Size, part: torch.Size) -> int | None:
        """The dimension along which the samples of a draw lie; None where it has none."""
        assert self._chosen is not None, "only replayed draws are divided"
        if len(self._chosen) == self._samples:  # the same shape, in another order
            return self._dims.get(number)
        if whole == part:
            return None

        draw = f"a draw of shape {tuple(whole)}"
        differing = []
        if len(whole) == len(part):
            differing = [dim for dim, size in enumerate(whole) if size != part[dim]]
        if len(differing) != 1:
            raise UnprovableDrawError(f"{draw} has the shape {tuple(part)} for single samples")

        dim = differing[0]
        if whole[dim] * len(self._chosen) != part[dim] * self._samples:
            raise UnprovableDrawError(f"{draw} is not divided evenly among samples")

        self._dims[number] = dim

        return dim


def _drops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a fused operator drops anything, by its argument of that name."""
    names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]
    given = dict(zip(names, args, strict=False)) | kwargs

    return bool(given.get("dropout_p", given.get("dropout")))


def _extreme(recorded: torch.Tensor, drawn: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """The smallest or the largest value that a draw may have; where unknown, that it had."""
    if not drawn.is_floating_point():
        both = torch.stack([recorded, drawn])
        return both.amax(0) if largest else both.amin(0)

    least = -3.0
    most = 3.0
    if bool(((recorded >= 0) & (recorded < 1)).all()):  # as torch.rand gives them
        least = 0.0
        most = 1 - 2**-10

    return torch.full_like(drawn, most if largest else least)
