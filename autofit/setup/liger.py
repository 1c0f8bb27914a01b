"""Stand-ins for Liger's Triton kernels in a traced step: the same tensors, and no arithmetic.

Liger need not be installed to plan, and Triton runs on a card alone. So what Liger's functions
allocate, overwrite and save for the backward is written down here; each kernel is one operator that
reads and writes the tensors it is given. tests/setup/test_liger.py compares this with liger-kernel
0.8.5, wherever that is installed.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.setup import requirements
from autofit.setup.state import Setup, Slices

_PROCESSORS = 132  # of an H100: the rows that are summed into the gradient of a norm's weight
_AMPERE = (8, 0)  # from here on a product is added to the gradient of the head's weight in place

_library = torch.library.Library("autofit", "FRAGMENT")
_library.define("kernel(Tensor[] tensors) -> ()")
_library.impl("kernel", lambda tensors: None, "CompositeExplicitAutograd")


def _kernel(*tensors: Tensor) -> None:
    """One launch; a tensor that is both read and written is given twice."""
    torch.ops.autofit.kernel(list(tensors))


# Model types -> whether Liger replaces their rotary embedding, and whether the backward of a norm
# overwrites the gradient it is given. All have their gated activations replaced.
_KINDS = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3"), (True, True)),
    **dict.fromkeys(("gemma", "granite", "smollm3", "phi3"), (True, True)),
    **dict.fromkeys(("gemma2", "gemma3_text", "exaone4"), (True, False)),
    "glm4": (False, False),
}
# Other model types that Liger supports: with experts, images, or norms that it replaces in part.
_OTHERS = """
deepseek_v2 deepseek_v3 deepseek_v4 falcon_h1 gemma3 gemma4 gemma4_text glm4v glm4v_moe gpt_oss
hunyuan_v1_dense hunyuan_v1_moe internvl llama4 llama4_text llava mixtral mllama mllama_text_model
muse_glimmer nemotron olmo2 olmo3 paligemma pixtral qwen2_5_vl qwen2_5_vl_text qwen2_vl
qwen2_vl_text qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl
qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text smolvlm
"""


def why_not_liger(value: str, hardware: Hardware, instead: str) -> str | None:
    """Why a knob's value that is made of Liger's kernels cannot run on this hardware."""
    if hardware.device != "cuda":
        return f"{value} is made of Triton kernels, which run on CUDA only; use {instead}."
    if not hardware.here:
        return None

    if lacking := requirements.missing("liger-kernel"):
        return f"{value} needs {lacking}, or use {instead}."
    if lacking := requirements.no_compiler(hardware.device):
        return f"{value} compiles its kernels: {lacking}, or use {instead}."
    return None


def stand_in_for_liger(setup: Setup) -> None:
    """Replace by stand-ins what Liger replaces in a transformers model.

    Raises:
        RefusedError: where Liger has no kernels for this type of model.
    """
    model: Any = setup.model
    name = getattr(getattr(model, "config", None), "model_type", None)

    if str(name) not in _KINDS:
        if str(name) not in _OTHERS.split():
            raise no_kernels_for(name)
        setup.tracing.assumptions.append(
            "liger's kernels were traced as the model's own operations, which save rather more."
        )
        return

    rotary, in_place = _KINDS[str(name)]
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            setup.patch(module, "forward", functools.partial(_norm, module, in_place))
        elif kind.endswith("MLP"):
            setup.patch(module, "forward", functools.partial(_gated, module))

    if rotary:
        code = sys.modules[type(model).forward.__module__]
        setup.patch(code, "apply_rotary_pos_emb", _rotated)


def no_kernels_for(kind: str | None) -> RefusedError:
    """The refusal of a type of model."""
    return RefusedError(f"liger has no kernels for models of type {kind}; use none.")


def _norm(module: Any, in_place: bool, hidden: Tensor) -> Tensor:
    """The forward of a norm."""
    return _Norm.apply(hidden.contiguous(), module.weight, in_place)  # type: ignore[no-any-return, no-untyped-call]


class _Norm(torch.autograd.Function):
    """RMSNorm. Saves its input and a number per row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        out = torch.empty_like(rows)
        scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        _kernel(rows, weight, out, scales)

        ctx.save_for_backward(rows, weight, scales)
        ctx.in_place = in_place
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        rows, weight, scales = ctx.saved_tensors
        upstream = upstream.contiguous()
        gradient = upstream if ctx.in_place else torch.zeros_like(upstream)
        if not ctx.needs_input_grad[1]:
            _kernel(upstream, rows, weight, scales, gradient)
            return gradient, None, None

        # each processor sums up its rows' gradients of the weight
        sums = torch.empty(_PROCESSORS, rows.shape[1], dtype=torch.float32, device=rows.device)
        _kernel(upstream, rows, weight, scales, gradient, sums)
        return gradient, sums.sum(0).to(weight.dtype), None


def _gated(module: Any, hidden: Tensor) -> Any:
    """The forward of an MLP: SwiGLU or GEGLU.

    A joint product stays alive until the end, and each half of it is copied.
    """
    joint = getattr(module, "gate_up_proj", None)
    if joint is None:
        return module.down_proj(_product(module.gate_proj(hidden), module.up_proj(hidden)))

    gate, up = joint(hidden).chunk(2, dim=-1)
    return module.down_proj(_product(gate, up))


def _product(gate: Tensor, up: Tensor) -> Tensor:
    """What goes into the last layer of an MLP."""
    return _Gated.apply(gate.contiguous(), up.contiguous())  # type: ignore[no-any-return, no-untyped-call]


class _Gated(torch.autograd.Function):
    """Saves its two inputs, which their gradients overwrite."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        _kernel(gate, up, out)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        _kernel(upstream.contiguous(), gate, up, gate, up)
        return gate.view_as(gate), up.view_as(up)


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Any:
    """Stands for `apply_rotary_pos_emb` of transformers."""
    return _Rotated.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]


class _Rotated(torch.autograd.Function):
    """Rotates queries and keys, and later their gradients, in place."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _rotate(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        return *_rotate(query, key, *ctx.saved_tensors), None, None


def _rotate(query: Tensor, key: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
    """As they lie in memory: (batch, length, heads, size)."""
    query, key = (tensor.transpose(1, 2).contiguous() for tensor in (query, key))
    _kernel(query, key, *angles, query, key)
    return query.transpose(1, 2), key.transpose(1, 2)


def chunk_rows(tokens: int, features: int, vocabulary: int) -> int:
    """Tokens per chunk of Liger's fused loss: their logits are about as large as all hidden
    states."""
    chunks = -(-vocabulary // features)
    rows = -(-tokens // chunks)
    if not rows:
        return 1
    return min(1 << (rows - 1).bit_length(), tokens)


def fused_cross_entropy(setup: Setup, slices: Slices) -> Callable[..., Tensor]:
    """Stands for Liger's function of this name, with these chunks."""
    capability = setup.hardware.capability
    in_place = capability is None or capability >= _AMPERE

    def summed(
        hidden: Tensor, weight: Tensor, classes: Tensor, bias: Tensor | None = None, **_: Any
    ) -> Tensor:
        return _FusedLoss.apply(hidden, weight, bias, classes, slices, in_place)  # type: ignore[no-any-return, no-untyped-call]

    return summed


class _FusedLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; gradients overwrite the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        classes: Tensor,
        slices: Slices,
        in_place: bool,
    ) -> Tensor:
        to_hidden = torch.zeros_like(hidden)
        to_weight = torch.zeros_like(weight) if weight.requires_grad else None
        to_bias = torch.zeros_like(bias) if bias is not None else None
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        # stands for the classes that are not ignored; alive until the end
        counted = classes != 0
        counted.sum()

        for part, logits in _logits(hidden, weight, bias, slices):
            # read for the maximum, read, written
            _kernel(logits, logits, logits, classes[part], losses[part])

            # the logits hold their own gradient from here on
            if _same_dtype(hidden, weight) and logits.dtype == hidden.dtype:
                torch.mm(logits, weight, out=to_hidden[part])
            else:
                to_hidden[part] = logits @ weight

            if to_weight is not None:
                _add_product(to_weight, logits.t(), hidden[part], in_place)
            if to_bias is not None:
                to_bias.add_(logits.sum(0))
            del logits

        ctx.save_for_backward(to_hidden, to_weight, to_bias)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        for gradient in ctx.saved_tensors:
            _kernel(gradient, gradient)
        return *ctx.saved_tensors, None, None, None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, slices: Slices
) -> Iterator[tuple[slice, Tensor]]:
    """The logits of each chunk; in shared memory, unless autocast or a bias in another format
    forbids it."""
    tokens, features = hidden.shape
    are_shared = _same_dtype(hidden, weight)
    if bias is not None and bias.dtype != hidden.dtype:
        are_shared = False

    shared = None
    for part in slices(tokens, features, len(weight)):
        if not are_shared:
            logits = hidden[part] @ weight.t()
            yield part, logits if bias is None else logits + bias
            del logits
            continue

        if shared is None:
            shared = hidden.new_empty(part.stop - part.start, len(weight))
        logits = shared[: len(hidden[part])]
        torch.mm(hidden[part], weight.t(), out=logits)
        yield part, logits if bias is None else logits.add_(bias)


def _same_dtype(hidden: Tensor, weight: Tensor) -> bool:
    """Whether a product of both is in their own format, and needs no copies."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != hidden.dtype:
        return False
    return hidden.dtype == weight.dtype


def _add_product(total: Tensor, left: Tensor, right: Tensor, in_place: bool) -> None:
    """Add a product to a gradient, as Liger does: in place where the card and the formats allow."""
    dtype = left.dtype
    is_low = dtype in (torch.float16, torch.bfloat16)
    fits = total.dtype in (torch.float32, dtype)
    if not (in_place and is_low and fits):
        total.add_(torch.mm(left, right).float())
        return

    right = right.to(dtype)
    if total.dtype == dtype:
        total.addmm_(left, right)
    # whose fake tensors lack the operator below: one as large, into half of the total
    elif torch.__version__ < "2.13":
        half = total.view(dtype)[:, : right.shape[1]]
        torch.addmm(half, left, right, out=half)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
