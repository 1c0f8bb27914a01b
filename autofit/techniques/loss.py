"""loss: the cross-entropy of a causal language model without ever holding the logits of all tokens.

With a vocabulary of 128,000, the logits of 8192 tokens are 4.2 GB in fp32, and the standard loss
holds three such tensors at once. Here each chunk's logits are turned into loss and gradients and
dropped, all in the forward.

Measured on 512 tokens of 256 features, a vocabulary of 32,000, a trained head in fp32, chunks of 64
tokens, one CPU thread: time of forward and backward, and the tracked bytes they add.

    the standard loss                            419 ms   188 MiB
    these chunks                                 380 ms    64 MiB
    chunks recomputed in the backward            648 ms    95 MiB   (a checkpoint each)
    torch.nn.functional.linear_cross_entropy     414 ms    64 MiB   (torch 2.13)

By its default policy the last saved nothing on 512 tokens of 16,384 classes, where these chunks
saved a quarter of a step's peak (benchmarks.levers). It is not used: no faster here, 522 ms against
193 ms in bf16 by its default policy, 2038 ms with the chunks it chooses itself, and no tracker sees
what it allocates inside. It supports no soft-cap, no autocast, and no head beyond a linear layer.

Nor is cut cross-entropy (Apple's package, 25.1.1, which has no logits in memory at all) a value. It
would save no memory: by prediction Llama 3.1 8B, NF4 with adapters, 4 x 2048 tokens on an H100,
holds 19.9 GiB with the standard loss, and 9.9 with these chunks or Liger's, whose peaks are in a
block, no longer in the loss. Its backward is of 16 bits only, takes no bias, and by default leaves
small gradients out (`filter_eps`). axolotl's export names its plugin.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.knobs.loss import KNOB
from autofit.core.knobs.precision import COMPUTES_IN_FP32
from autofit.core.tasks import TASKS
from autofit.setup import (
    Config,
    Hardware,
    RefusedError,
    Setup,
    Stage,
    Technique,
    Value,
    Workload,
    liger,
)
from autofit.setup.deferred_logits import (
    NO_HEAD,
    Deferral,
    Pending,
    SummedLoss,
    defer_logits,
    loss_of_few_tokens,
)
from autofit.setup.state import Slices

_ROWS = 256  # tokens that keep a GPU's matrix units busy while the head's weight is read
# So that a chunk's logits, with the copies a loss makes of them, are a small part of all.
_LEAST_CHUNKS = 8
_TOLERANCE = 1e-3  # relative, of the loss against the model's own
_LOW_PRECISION_TOLERANCE = 1e-2


class Loss(Technique):
    """`standard`: the model's own. `chunked`: some tokens at a time, in PyTorch. `fused`: by
    Liger's Triton kernels.

    No memory order: with fewer tokens in a micro-batch than the rank of an adapter on the head, a
    chunk's gradient of that adapter, beside their sum, is larger than the logits were.
    """

    record = KNOB
    stage = Stage.BLOCKS
    cuda_values = ("fused",)
    all_exact = True

    def package(self, value: Value) -> str:
        return "liger-kernel" if value == "fused" else "torch"

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = config[self.name]
        if value == self.off:
            return None

        if value == "fused":
            if reason := liger.why_not_liger("fused", hardware, "chunked"):
                return reason
            if any(part.endswith("head") for part in str(config.lora_targets).split("+")):
                return (
                    "fused reads the head's weight itself and would skip its adapters; use chunked."
                )

        if workload.loss is not None:
            return "a loss function of your own may need the logits; use standard."

        if not TASKS[workload.task].defers_logits:
            return (
                f"only causal language models can do without all logits, not {workload.task}; use "
                "standard."
            )
        if workload.traits and not workload.traits.head:
            return NO_HEAD
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        batch = setup.workload.batch(1)  # once: a factory may draw other tokens each time
        before = loss_of_few_tokens(setup, batch)
        deferral = defer_logits(setup, _SUMMED[str(value)])
        after = loss_of_few_tokens(setup, batch)
        if deferral.computed:
            raise RefusedError(
                "the model's forward uses its logits for more than a causal LM's loss; use standard."
            )

        is_low = setup.config.precision not in COMPUTES_IN_FP32
        tolerance = _LOW_PRECISION_TOLERANCE if is_low else _TOLERANCE
        if math.isfinite(before) and abs(after - before) > tolerance * abs(before):
            raise RefusedError(
                f"the {value} loss is {after:.6g} where the model's own is {before:.6g}; use "
                "standard."
            )

    def trace(self, setup: Setup, value: Value) -> None:
        """Without the comparison, which needs numbers; Liger's kernels have a stand-in."""
        slices = setup.tracing.slices or functools.partial(token_slices, rows=ROWS[str(value)])
        summed: SummedLoss = functools.partial(chunked_loss, slices=slices)
        if value == "fused":
            summed = functools.partial(fused_loss, kernels=liger.fused_cross_entropy(setup, slices))
        defer_logits(setup, summed)


def chunk_rows(tokens: int, features: int, vocabulary: int) -> int:
    """Tokens per chunk.

    Enough to make a chunk's logits as large as the hidden states of all tokens, but not fewer than
    keep a GPU busy (the gradient of the head's weight is read and written once per chunk), nor more
    than an eighth of all tokens.
    """
    rows = max(_ROWS, tokens * features // vocabulary)
    rows = -(-rows // 8) * 8  # matrix units like multiples of 8
    return max(1, min(rows, -(-tokens // _LEAST_CHUNKS)))


Rows = Callable[[int, int, int], int]
Sums = dict[nn.Parameter, torch.Tensor]  # a parameter -> the sum of the chunks' gradients of it
ROWS: dict[str, Rows] = {"chunked": chunk_rows, "fused": liger.chunk_rows}


def token_slices(
    tokens: int, features: int, vocabulary: int, *, rows: Rows = chunk_rows
) -> Iterator[slice]:
    """The tokens of each chunk."""
    count = rows(tokens, features, vocabulary)
    # at least one, maybe empty
    return (slice(start, start + count) for start in range(0, max(tokens, 1), count))


@dataclass(frozen=True)
class _Chunks:
    """Hidden states (tokens, features), the class of each token, and how to make the logits."""

    pending: Pending
    hidden: torch.Tensor
    classes: torch.Tensor
    ignored: int
    slices: Slices

    def __iter__(self) -> Iterator[slice]:
        vocabulary: Any = self.pending.deferral.head.out_features
        return self.slices(len(self.hidden), self.hidden.shape[1], vocabulary)

    def loss(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """The sum over these tokens, in fp32 as in transformers."""
        return functional.cross_entropy(
            logits.float(), classes, ignore_index=self.ignored, reduction="sum"
        )


def chunked_loss(
    pending: Pending, classes: torch.Tensor, ignored: int, *, slices: Slices = token_slices
) -> torch.Tensor:
    """The sum of the tokens' losses; gradients flow to the hidden states and to the head's
    parameters."""
    head = pending.deferral.head
    hidden = pending.hidden.reshape(-1, pending.hidden.shape[-1])
    chunks = _Chunks(pending, hidden.detach(), classes, ignored, slices)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        total: torch.Tensor = _ChunkedLoss.apply(chunks, hidden, *trained)  # type: ignore[no-untyped-call]
        return total

    with torch.no_grad():
        losses = [chunks.loss(pending.of(chunks.hidden[part]), classes[part]) for part in chunks]
        return torch.stack(losses).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; the backward only scales them.

    Every parameter of the head is an input once, so its gradient accumulates, and its hooks run,
    once per backward. The gradients are of the sum, not the mean: those of a mean over thousands of
    tokens would vanish in fp16.
    """

    @staticmethod
    def forward(
        ctx: Any, chunks: _Chunks, hidden: torch.Tensor, *trained: nn.Parameter
    ) -> torch.Tensor:
        sums: Sums = {parameter: torch.zeros_like(parameter) for parameter in trained}
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[1] else None
        add = _add_plain if is_plain(chunks.pending.deferral) else _add_any
        total = torch.zeros((), device=hidden.device)
        for part in chunks:
            own = gradient[part] if gradient is not None else None
            total += add(chunks, chunks.hidden[part], chunks.classes[part], sums, own)

        # Not save_for_backward: hooks of activation offloading are for activations.
        ctx.gradients = [gradient, *sums.values()]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError(
                "the chunked loss was differentiated before, which freed its gradients."
            )

        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(upstream[0])
        return None, *gradients


def is_plain(deferral: Deferral) -> bool:
    """Whether the head is a bare linear layer: no adapter, quantised or sharded weight, hook or
    wrapper."""
    weight: Any = deferral.head.weight
    return deferral.is_bare and not is_traceable_wrapper_subclass(weight)


def _add_plain(
    chunks: _Chunks,
    rows: torch.Tensor,
    classes: torch.Tensor,
    sums: Sums,
    to_rows: torch.Tensor | None,
) -> torch.Tensor:
    """By hand: autograd would make a whole weight's gradient per chunk before adding it."""
    head: Any = chunks.pending.deferral.head
    with _own_graph():
        with torch.no_grad():
            leaf = chunks.pending.raw(rows)
        leaf = leaf.requires_grad_()
        loss = chunks.loss(chunks.pending.finished(leaf), classes)
        (gradient,) = torch.autograd.grad(loss, leaf)
    del leaf

    if to_rows is not None:
        to_rows.copy_(gradient @ head.weight)
    weight = sums.get(head.weight)
    bias = sums.get(head.bias)

    if weight is not None and weight.dtype == gradient.dtype == rows.dtype:
        weight.addmm_(gradient.t(), rows)
    elif weight is not None:
        weight += gradient.t() @ rows  # under autocast the product is in the low format
    if bias is not None:
        bias += gradient.sum(0)
    return loss.detach()


def _add_any(
    chunks: _Chunks,
    rows: torch.Tensor,
    classes: torch.Tensor,
    sums: Sums,
    to_rows: torch.Tensor | None,
) -> torch.Tensor:
    """By autograd, through any head."""
    inputs: list[torch.Tensor] = list(sums)
    with _own_graph():
        if to_rows is not None:
            rows = rows.detach().requires_grad_()
            inputs.append(rows)
        loss = chunks.loss(chunks.pending.of(rows), classes)
        gradients = list(torch.autograd.grad(loss, inputs))

    if to_rows is not None:
        to_rows.copy_(gradients.pop())
    for total, gradient in zip(sums.values(), gradients, strict=True):
        total += gradient
    return loss.detach()


@contextmanager
def _own_graph() -> Iterator[None]:
    """A graph for one chunk: with gradients, without the hooks that offload saved tensors."""
    plain = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with torch.enable_grad(), plain:
        yield


def fused_loss(
    pending: Pending,
    classes: torch.Tensor,
    ignored: int,
    *,
    kernels: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """The sum of the tokens' losses by Liger's kernels, which support a scale and a soft-cap
    between head and loss.

    Args:
        kernels: a stand-in for Liger's function.

    Raises:
        RefusedError: where the model does something else there, or the head is more than a linear
            layer.
    """
    if kernels is None:
        functions: Any = importlib.import_module("liger_kernel.transformers.functional")
        kernels = functions.liger_fused_linear_cross_entropy

    head: Any = pending.deferral.head
    if not is_plain(pending.deferral):
        raise RefusedError("fused needs an output head that is a bare linear layer; use chunked.")

    scale, cap = scale_and_cap(pending)
    if scale != 1.0 and head.bias is not None:
        raise RefusedError("fused cannot scale the logits of a head with a bias; use chunked.")

    hidden = pending.hidden.reshape(-1, pending.hidden.shape[-1])
    if scale != 1.0:
        hidden = hidden * scale
    options = {"bias": head.bias, "ignore_index": ignored, "reduction": "sum", "softcap": cap}
    return kernels(hidden, head.weight, classes, **options)


def scale_and_cap(pending: Pending) -> tuple[float, float | None]:
    """The model's scale and soft-cap of its logits: `cap * tanh(scale * logits / cap)`; cap None
    for no cap.

    Raises:
        RefusedError: where the model does something else to them.
    """
    steps = []
    for step in pending.steps:
        name = step.function.__name__
        if name == "true_divide":
            name = "div"
        if name not in ("float", "to", "contiguous"):
            steps.append((name, step.args))

    cap = None
    if [name for name, _ in steps[-3:]] == ["div", "tanh", "mul"] and steps[-3][1] == steps[-1][1]:
        cap = float(steps[-1][1][0])
        steps = steps[:-3]

    scale = 1.0
    for name, args in steps:
        if name == "mul":
            scale = scale * float(args[0])
        elif name == "div":
            scale = scale / float(args[0])
        else:
            raise RefusedError(
                f"fused does not support {name} between the head and the loss; use chunked."
            )
    return scale, cap


_SUMMED: dict[str, SummedLoss] = {"chunked": chunked_loss, "fused": fused_loss}
