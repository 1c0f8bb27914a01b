"""What stands for Liger's Triton kernels where a training step is traced: the same tensors, and no arithmetic.

Liger need not be installed to plan, and Triton computes on a card alone. So what Liger's functions allocate, overwrite
and keep for the backward is written down here, each kernel being one operator that reads and writes the tensors it is
given. Held against liger-kernel 0.8.5 by tests/setup/test_liger.py, wherever that is installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autofit.core.errors import RefusedError
from autofit.setup.state import Setup, Slices

_PROCESSORS = 132  # of an H100: as many rows are summed into the gradient of a norm's weight
_AMPERE = (8, 0)  # from there on a product is added to the gradient of the head's weight without a copy of it

_library = torch.library.Library("autofit", "FRAGMENT")
_library.define("kernel(Tensor[] tensors) -> ()")
_library.impl("kernel", lambda tensors: None, "CompositeExplicitAutograd")


def _kernel(*tensors: torch.Tensor | None) -> None:
    """One launch; a tensor that is both read and written is given twice."""
    torch.ops.autofit.kernel([each for each in tensors if each is not None])


@dataclass(frozen=True)
class _Kind:
    """What Liger changes about a kind of models beside the gated activation of their MLPs.

    `in_place`: whether the backward of a norm writes over the gradient that it is given.
    """

    rotary: bool = True
    in_place: bool = True


_KINDS = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "phi3"), _Kind()
    ),
    **dict.fromkeys(("gemma2", "gemma3_text", "exaone4"), _Kind(in_place=False)),
    "glm4": _Kind(rotary=False, in_place=False),
}
# The others that Liger has kernels for: with experts, images, or a part of their norms left as it is.
_OTHERS = """
deepseek_v2 deepseek_v3 deepseek_v4 falcon_h1 gemma3 gemma4 gemma4_text glm4v glm4v_moe gpt_oss hunyuan_v1_dense
hunyuan_v1_moe internvl llama4 llama4_text llava mixtral mllama mllama_text_model muse_glimmer nemotron olmo2 olmo3
paligemma pixtral qwen2_5_vl qwen2_5_vl_text qwen2_vl qwen2_vl_text qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text smolvlm
"""


def stand_in_for_liger(setup: Setup) -> None:
    """Put stand-ins in the place of what Liger changes about a transformers model.

    Raises:
        RefusedError: it has no kernels for this kind of model.
    """
    model: Any = setup.model
    name = getattr(getattr(model, "config", None), "model_type", None)
    kind = _KINDS.get(str(name))
    if kind is None:
        if str(name) not in _OTHERS.split():
            raise no_kernels_for(name)
        setup.assumptions.append("liger's kernels were traced as the model's own operations, which keep rather more.")
        return
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _replace(setup, vars(module), "forward", functools.partial(_norm, module, kind.in_place))
        elif type(module).__name__.endswith("MLP"):
            _replace(setup, vars(module), "forward", functools.partial(_gated, module))
    if kind.rotary:
        _replace(setup, vars(sys.modules[type(model).__module__]), "apply_rotary_pos_emb", _rotated)


def no_kernels_for(kind: str | None) -> RefusedError:
    """What Liger cannot do."""
    return RefusedError(f"liger has no kernels for models of type {kind}; use none.")


def _replace(setup: Setup, names: dict[str, Any], name: str, value: Callable[..., Any]) -> None:
    if name in names:
        setup.on_close(functools.partial(names.__setitem__, name, names[name]))
    else:
        setup.on_close(functools.partial(names.pop, name))
    names[name] = value


def _norm(module: Any, in_place: bool, hidden: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Norm.apply(hidden.contiguous(), module.weight, in_place)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    """Keeps its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        out = torch.empty_like(rows)
        scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        _kernel(rows, weight, out, scales)
        ctx.save_for_backward(rows, weight, scales)
        ctx.in_place = in_place
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, scales = ctx.saved_tensors
        upstream = upstream.contiguous()
        gradient = upstream if ctx.in_place else torch.zeros_like(upstream)
        sums = None
        if ctx.needs_input_grad[1]:
            sums = torch.empty(_PROCESSORS, rows.shape[1], dtype=torch.float32, device=rows.device)
        _kernel(upstream, rows, weight, scales, gradient, sums)
        return gradient, None if sums is None else sums.sum(0).to(weight.dtype), None


def _gated(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """SwiGLU or GEGLU. A product that is both halves at once is alive until the end, and each half is copied."""
    joined = getattr(module, "gate_up_proj", None)
    if joined is not None:
        gate, up = joined(hidden).chunk(2, dim=-1)
        out: torch.Tensor = module.down_proj(_product(gate, up))
    else:
        out = module.down_proj(_product(module.gate_proj(hidden), module.up_proj(hidden)))
    return out


def _product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _Gated.apply(gate.contiguous(), up.contiguous())  # type: ignore[no-untyped-call]
    return product


class _Gated(torch.autograd.Function):
    """Keeps its two inputs; their gradients are written over them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gate)
        _kernel(gate, up, out)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        _kernel(upstream.contiguous(), gate, up, gate, up)
        return gate.view_as(gate), up.view_as(up)


def _rotated(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any) -> Any:
    return _Rotated.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]


class _Rotated(torch.autograd.Function):
    """Turns queries and keys, and later their gradients, where they lie."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _turned(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
        return *_turned(query, key, *ctx.saved_tensors), None, None


def _turned(query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As they lie in memory: (batch, length, heads, size)."""
    query, key = (each.transpose(1, 2).contiguous() for each in (query, key))
    _kernel(query, key, *angles, query, key)
    return query.transpose(1, 2), key.transpose(1, 2)


def chunk_rows(tokens: int, features: int, vocabulary: int) -> int:
    """How many tokens' logits Liger's fused loss makes at a time: about as large as all hidden states."""
    wanted = -(-tokens // -(-vocabulary // features))
    return min(1 << (wanted - 1).bit_length(), tokens) if wanted else 1


def fused_cross_entropy(setup: Setup, slices: Slices) -> Callable[..., torch.Tensor]:
    """What stands for Liger's function of this name, with chunks of these tokens."""
    card = setup.hardware.capability
    in_place = card is None or card >= _AMPERE

    def summed(
        hidden: torch.Tensor, weight: torch.Tensor, classes: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        loss: torch.Tensor = _FusedLoss.apply(hidden, weight, bias, classes, slices, in_place)  # type: ignore[no-untyped-call]
        return loss

    return summed


class _FusedLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks, whose logits become their own gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        classes: torch.Tensor,
        slices: Slices,
        in_place: bool,
    ) -> torch.Tensor:
        gradients = _Gradients(
            torch.zeros_like(hidden),
            torch.zeros_like(weight) if weight.requires_grad else None,
            torch.zeros_like(bias) if bias is not None else None,
            in_place,
        )
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        counted = classes != 0  # those that are not ignored, by their number; alive until the end
        counted.sum()
        for part, logits in _logits(hidden, weight, bias, slices):
            _kernel(logits, logits, logits, classes[part], losses[part])  # read for the maximum, read, written
            gradients.add(part, logits, hidden[part], weight)
            del logits
        ctx.save_for_backward(*gradients.all())
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        for each in ctx.saved_tensors:
            _kernel(each, each)
        return *ctx.saved_tensors, None, None, None


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slices: Slices
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Of each chunk: in memory that all share, unless autocast or a bias in another format forbids it."""
    (tokens, features), shared = hidden.shape, None
    for part in slices(tokens, features, len(weight)):
        if not _alike(hidden, weight) or (bias is not None and bias.dtype != hidden.dtype):
            logits = hidden[part] @ weight.t()
            yield part, logits if bias is None else logits + bias
            del logits
            continue
        if shared is None:
            shared = hidden.new_empty(part.stop - part.start, len(weight))
        logits = shared[: len(hidden[part])]
        torch.mm(hidden[part], weight.t(), out=logits)
        yield part, logits if bias is None else logits.add_(bias)


def _alike(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return hidden.dtype == weight.dtype == autocast


@dataclass(frozen=True)
class _Gradients:
    """What the gradients of the chunks are written and added to."""

    hidden: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    in_place: bool

    def all(self) -> tuple[torch.Tensor | None, ...]:
        return self.hidden, self.weight, self.bias

    def add(self, part: slice, slope: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """A chunk's, by the gradient of its logits."""
        if _alike(hidden, weight) and slope.dtype == hidden.dtype:
            torch.mm(slope, weight, out=self.hidden[part])
        else:
            self.hidden[part] = slope @ weight
        if self.weight is not None:
            low = slope.dtype in (torch.float16, torch.bfloat16)
            if self.in_place and low and self.weight.dtype in (torch.float32, slope.dtype):
                _add_product(self.weight, slope.t(), hidden.to(slope.dtype))
            else:
                self.weight.add_(torch.mm(slope.t(), hidden).float())
        if self.bias is not None:
            self.bias.add_(slope.sum(0))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Without a product beside the total."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif torch.__version__ < "2.13":  # whose fake tensors lack the operator below: one as large, into half of the total
        half = total.view(left.dtype)[:, : right.shape[1]]
        torch.addmm(half, left, right, out=half)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
