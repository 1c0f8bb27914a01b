"""MLPs that are computed in tiles of a sequence, and again in the backward, so that what is inside
of them is held of one tile at a time (Arctic long sequence training, arXiv:2506.13996, section
3.1.2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from autofit.core.errors import InputError, is_whole, require

if TYPE_CHECKING:
    import torch
    from torch import nn

_TOKENS = 32_768  # of a tile at most, where no number of tiles is given: as axolotl's
_LAYERS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class TiledMlp:
    """How many tiles each sequence has.

    Attributes:
        count: None for as many as leave at most 32,768 tokens in each.
    """

    count: int | None = None

    @classmethod
    def of_source(cls, value: object) -> Self | None:
        """As `to_source` wrote it; None of nothing.

        Raises:
            InputError: the value is anything else.
        """
        if value is None:
            return None
        require(isinstance(value, Mapping), "tiled MLPs must hold values by name", value)
        assert isinstance(value, Mapping)
        count = value.get("count")
        fine = count is None or is_whole(count, 1)
        require(fine, "the count of tiles must be a positive whole number", count)

        return cls(count)

    def to_source(self) -> dict[str, Any]:
        """As plain data."""
        return {} if self.count is None else {"count": self.count}

    def of(self, tokens: int) -> int:
        """The tiles of a sequence of so many tokens."""
        return self.count or max(1, math.ceil(tokens / _TOKENS))

    def apply(self, model: nn.Module) -> None:
        """Let all MLPs of a model compute in tiles. They keep their layers.

        Raises:
            InputError: the model has no MLP of this kind.
        """
        found = []
        for module in model.modules():
            is_named = type(module).__name__.endswith("MLP")
            if is_named and all(hasattr(module, layer) for layer in _LAYERS):
                found.append(module)

        if not found:
            message = "the model has no MLPs of gate_proj, up_proj and down_proj to tile."
            raise InputError(message, "Leave tiles out, or choose another model.")

        for module in found:
            theirs: Any = module
            theirs.tiles = self
            theirs.__class__ = _tiled(theirs.__class__)


@cache
def _tiled(kind: Any) -> Any:
    """The class of an MLP that computes in tiles, of one that does not."""

    @functools.wraps(kind.forward)
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        count = self.tiles.of(hidden.shape[-2])
        compute = functools.partial(kind.forward, self)
        found: torch.Tensor = _in_tiles().apply(compute, count, hidden, *trained)

        return found

    return type(f"Tiled{kind.__name__}", (kind,), {"forward": forward})


@cache
def _in_tiles() -> Any:
    import torch

    class InTiles(torch.autograd.Function):
        """A function of hidden states, a tile of the sequence at a time."""

        @staticmethod
        def forward(
            ctx: Any,
            compute: Any,
            count: int,
            hidden: torch.Tensor,
            *trained: torch.Tensor,
        ) -> torch.Tensor:
            device = hidden.device.type
            ctx.compute = compute
            ctx.count = count
            ctx.trained = trained
            ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            ctx.save_for_backward(hidden)

            return torch.cat([compute(tile) for tile in hidden.chunk(count, dim=-2)], dim=-2)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (hidden,) = ctx.saved_tensors
            asks_inputs = ctx.needs_input_grad[2]
            is_on, dtype = ctx.autocast

            of_hidden = torch.zeros_like(hidden)
            of_trained = [torch.zeros_like(weight) for weight in ctx.trained]
            whole = (hidden, gradient, of_hidden)
            parts = zip(*(tensor.chunk(ctx.count, dim=-2) for tensor in whole), strict=True)
            for tile, its_gradient, place in parts:
                tile = tile.detach().requires_grad_(asks_inputs)
                with (
                    torch.enable_grad(),
                    torch.autocast(hidden.device.type, dtype=dtype, enabled=is_on),
                ):
                    output = ctx.compute(tile)

                inputs = list(ctx.trained)
                if asks_inputs:
                    inputs.insert(0, tile)
                found = list(torch.autograd.grad(output, inputs, its_gradient))
                if asks_inputs:
                    place.copy_(found.pop(0))
                for total, part in zip(of_trained, found, strict=True):
                    total.add_(part)
                del found  # before the next tile makes its own

            return None, None, of_hidden if asks_inputs else None, *of_trained

    return InTiles
