"""The loss of a causal language model as TRL computes it where it has no Triton: tiles of logits,
each with the copies that PyTorch's own operators make of it.

It is what such a training of TRL's holds, so that a file of TRL is tuned by TRL's own bytes. On a
card TRL has kernels that work inside of a tile. Written after `trl.kernels.chunked_logprob` of TRL
1.16: what is computed, in which order, and what lives meanwhile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.task import IGNORED_LABEL
from autofit.core.tasks.causal_lm import CAUSAL_LM

if TYPE_CHECKING:
    import torch

ROWS = 4096  # tokens of a tile
COLUMNS = 32768  # its part of the vocabulary


@dataclass(frozen=True)
class InTiles:
    """(model, batch) -> the mean over the tokens that are predicted."""

    task: ClassVar[str] = CAUSAL_LM.name
    tool: ClassVar[str] = "trl"

    @staticmethod
    def count(batch: Mapping[str, Any]) -> float:
        """The tokens that are predicted."""
        return float((batch["labels"][:, 1:] != IGNORED_LABEL).sum())

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        causal = model
        has_adapters = hasattr(model, "peft_config")
        if has_adapters and callable(getattr(model, "get_base_model", None)):
            causal = model.get_base_model()

        output = causal.base_model(**inputs, use_cache=False)
        hidden = output.last_hidden_state[:, :-1]
        labels = batch["labels"][:, 1:]
        mask = labels != IGNORED_LABEL

        head = causal.get_output_embeddings()
        scale, cap = _scale_and_cap(causal.config.get_text_config())
        of_tokens = _log_probabilities().apply(
            hidden.reshape(-1, hidden.size(-1)),
            head.weight,
            head.bias,
            labels.clamp(min=0).reshape(-1),
            scale,
            cap,
        )
        log_probabilities, _, _ = (
            value.view(mask.shape).masked_fill(~mask, 0) for value in of_tokens
        )
        losses = -log_probabilities
        loss: torch.Tensor = losses.sum() / mask.sum().clamp(min=1)

        return loss


def _scale_and_cap(config: Any) -> tuple[float, float | None]:
    """What a model multiplies its logits by, and its soft-cap."""
    cap = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(config, name, None)
        if scale is not None:
            return float(scale), cap

    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0, cap
    return 1 / divisor, cap


def _tiles(tokens: int, vocabulary: int) -> Iterator[tuple[slice, slice]]:
    """The tokens of each tile, and its part of the vocabulary."""
    for row in range(0, tokens, ROWS):
        rows = slice(row, min(row + ROWS, tokens))
        for column in range(0, vocabulary, COLUMNS):
            yield rows, slice(column, min(column + COLUMNS, vocabulary))


@functools.cache
def _log_probabilities() -> Any:
    """The function of autograd. Made when it is first used: torch takes seconds to import."""
    import torch

    def buffer(hidden: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        rows = min(len(hidden), ROWS)
        return torch.empty((rows, COLUMNS), device=hidden.device, dtype=kind)

    def logits(tile: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
        """Those of a tile in float32, scaled and soft-capped; the temperature is 1."""
        values = tile.float() * scale
        if cap is not None:
            values = cap * torch.tanh(values / cap)

        return values * 1.0

    def fold(
        tile: torch.Tensor,
        local: torch.Tensor,
        sums: Mapping[str, torch.Tensor],
        scale: float,
        cap: float | None,
    ) -> None:
        """Add a tile to the running sums of its tokens; `local`: where the targets are in it."""
        columns = tile.shape[1]
        values = logits(tile, scale, cap)

        before = torch.arange(columns, device=tile.device) < local.unsqueeze(-1)
        largest_before = values.masked_fill(~before, -math.inf).amax(-1)
        sums["before"].copy_(torch.maximum(sums["before"], largest_before))

        largest = torch.maximum(sums["largest"], values.amax(-1))
        again = torch.exp(sums["largest"] - largest)
        powers = torch.exp(values - largest.unsqueeze(-1))
        sums["powers"].mul_(again).add_(powers.sum(-1))
        sums["weighted"].mul_(again).add_((powers * values).sum(-1))
        sums["largest"].copy_(largest)

        is_inside = (local >= 0) & (local < columns)
        own = values.gather(-1, local.clamp(0, columns - 1).unsqueeze(-1)).squeeze(-1)
        sums["target"].copy_(torch.where(is_inside, own, sums["target"]))

    def to_gradient(
        tile: torch.Tensor,
        local: torch.Tensor,
        log_total: torch.Tensor,
        upstream: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> None:
        """Put the gradient of a tile's logits in place of these."""
        plain = tile.float() * scale
        bent = None
        if cap is None:
            values = plain * 1.0
        else:
            bent = torch.tanh(plain / cap)
            values = cap * bent * 1.0

        logs = values - log_total.unsqueeze(-1)
        shares = torch.exp(logs)
        gradient = torch.zeros_like(values)
        columns = torch.arange(tile.shape[1], device=tile.device)
        is_target = columns == local.unsqueeze(-1)
        gradient += upstream.unsqueeze(-1) * (is_target.float() - shares)
        gradient = gradient * 1.0
        if bent is not None:
            gradient = gradient * (1 - bent * bent)
        tile.copy_(gradient * scale)

    class LogProbabilities(torch.autograd.Function):
        """Of each token's target, with its entropy and whether it is the likeliest."""

        @staticmethod
        def forward(
            ctx: Any,
            hidden: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            targets: torch.Tensor,
            scale: float,
            cap: float | None,
        ) -> Any:
            ctx.set_materialize_grads(False)
            kind = hidden.dtype
            if torch.is_autocast_enabled(hidden.device.type):
                kind = torch.get_autocast_dtype(hidden.device.type)
            tokens = len(hidden)

            def of_tokens(value: float) -> torch.Tensor:
                return torch.full(
                    (tokens,),
                    value,
                    device=hidden.device,
                    dtype=torch.float32,
                )

            sums = {
                "largest": of_tokens(-math.inf),
                "powers": of_tokens(0),
                "weighted": of_tokens(0),
                "before": of_tokens(-math.inf),
                "target": of_tokens(0),
            }
            held = buffer(hidden, kind)
            for rows, columns in _tiles(tokens, len(weight)):
                some = hidden[rows].to(kind)
                tile = held[: len(some), : columns.stop - columns.start]
                torch.mm(some, weight[columns].to(kind).t(), out=tile)
                if bias is not None:
                    tile.add_(bias[columns].to(kind))
                part = {name: value[rows] for name, value in sums.items()}
                fold(tile, targets[rows] - columns.start, part, scale, cap)

            log_total = sums["largest"] + torch.log(sums["powers"])
            entropy = log_total - sums["weighted"] / sums["powers"]
            is_first = sums["target"] > sums["before"]
            is_likeliest = (sums["target"] >= sums["largest"]) & is_first
            ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropy)
            ctx.kind = kind
            ctx.numbers = scale, cap
            ctx.mark_non_differentiable(is_likeliest)

            return sums["target"] - log_total, entropy, is_likeliest

        @staticmethod
        def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
            hidden, weight, bias, targets, log_total, _ = ctx.saved_tensors
            kind = ctx.kind
            given = upstream[0]
            assert given is not None
            given = given.float().contiguous()
            tensors = (hidden, weight, bias)
            totals: list[torch.Tensor | None] = []
            for tensor, is_needed in zip(tensors, ctx.needs_input_grad[:3], strict=True):
                total = None
                if is_needed:
                    shape = tensor.shape
                    total = torch.zeros(shape, device=tensor.device, dtype=torch.float32)
                totals.append(total)

            of_hidden, of_weight, of_bias = totals
            held = buffer(hidden, kind)
            for rows, columns in _tiles(len(hidden), len(weight)):
                some = hidden[rows].to(kind)
                of_columns = weight[columns].to(kind)
                tile = held[: len(some), : columns.stop - columns.start]
                torch.mm(some, of_columns.t(), out=tile)
                if bias is not None:
                    tile.add_(bias[columns].to(kind))
                local = targets[rows] - columns.start
                to_gradient(tile, local, log_total[rows], given[rows], *ctx.numbers)
                if of_hidden is not None:
                    of_hidden[rows].addmm_(tile.float(), of_columns.float())
                if of_weight is not None:
                    of_weight[columns].addmm_(tile.t().float(), some.float())
                if of_bias is not None:
                    of_bias[columns] += tile.sum(dim=0, dtype=torch.float32)

            found = []
            for total, tensor in zip(totals, tensors, strict=True):
                if total is not None:
                    total = total.to(tensor.dtype)
                found.append(total)

            return *found, None, None, None

    return LogProbabilities
