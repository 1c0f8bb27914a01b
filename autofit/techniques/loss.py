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
from typing import Any, Self

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
    DeferredLogits,
    OfTokens,
    Pending,
    SummedLoss,
    defer_logits,
    defer_to_loss,
    defers_logits,
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
            return _refused_beside_own_loss(config, workload)

        if not TASKS[workload.task].defers_logits:
            return (
                f"only causal language models can do without all logits, not {workload.task}; use "
                "standard."
            )
        if workload.traits and not workload.traits.head:
            return NO_HEAD
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if setup.part is not None and not setup.part.is_last:  # a stage without a loss
            return

        if setup.workload.loss is not None:
            _defer_to_own_loss(setup, token_slices)
            return

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
        if setup.part is not None and not setup.part.is_last:
            return

        slices = setup.tracing.slices or functools.partial(token_slices, rows=ROWS[str(value)])
        if setup.workload.loss is not None:
            _defer_to_own_loss(setup, slices)
            return

        summed: SummedLoss = functools.partial(chunked_loss, slices=slices)
        if value == "fused":
            summed = functools.partial(fused_loss, kernels=liger.fused_cross_entropy(setup, slices))
        defer_logits(setup, summed)


def _refused_beside_own_loss(config: Config, workload: Workload) -> str | None:
    """Why a loss function of one's own cannot do without all logits."""
    if not getattr(workload.loss, "reads_by_token", False):
        return "a loss function of your own may need the logits; use standard."
    if config.loss == "fused":
        return "Liger's kernels compute the model's own loss alone; use chunked."
    if workload.traits and not workload.traits.head:
        return NO_HEAD
    if config.data_parallel == "fsdp" and not config.lora_rank:
        return (
            "the head's chunks are computed again in the backward, when FSDP has divided its "
            "weight; use standard."
        )
    return None


def _defer_to_own_loss(setup: Setup, slices: Slices) -> None:
    """Defer the logits of every model that the loss asks and that can defer them."""
    by_token = functools.partial(chunked_by_token, slices=slices)
    defer_to_loss(setup, setup.model, by_token)
    for model in setup.frozen.values():
        if defers_logits(model):
            defer_to_loss(setup, model, by_token)


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
    """Hidden states [tokens, features], and what makes numbers of the logits of some tokens.

    `numbers` is (logits, the tokens) -> a number for each of them, or their sum.
    """

    pending: Pending
    hidden: torch.Tensor
    slices: Slices
    numbers: Callable[[torch.Tensor, slice], torch.Tensor]

    @classmethod
    def of(
        cls, pending: Pending, slices: Slices, numbers: Callable[[torch.Tensor, slice], Any]
    ) -> Self:
        """The chunks of all tokens."""
        hidden = pending.hidden.detach()
        return cls(pending, hidden.reshape(-1, hidden.shape[-1]), slices, numbers)

    def __iter__(self) -> Iterator[slice]:
        vocabulary: Any = self.pending.deferral.head.out_features
        return self.slices(len(self.hidden), self.hidden.shape[1], vocabulary)

    def without_gradients(self, part: slice) -> torch.Tensor:
        """The numbers of one chunk, or their sum."""
        with torch.no_grad():
            return self.numbers(self.pending.of(self.hidden[part]), part)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The head's parameters that get gradients."""
        head = self.pending.deferral.head
        return [parameter for parameter in head.parameters() if parameter.requires_grad]


def chunked_loss(
    pending: Pending, classes: torch.Tensor, ignored: int, *, slices: Slices = token_slices
) -> torch.Tensor:
    """The sum of the tokens' losses; gradients flow to the hidden states and to the head's
    parameters."""

    def summed(logits: torch.Tensor, part: slice) -> torch.Tensor:
        """The sum over these tokens, in fp32 as in transformers."""
        return functional.cross_entropy(
            logits.float(), classes[part], ignore_index=ignored, reduction="sum"
        )

    chunks = _Chunks.of(pending, slices, summed)
    if _needs_gradients(chunks):
        hidden = pending.hidden.reshape(chunks.hidden.shape)
        total: torch.Tensor = _ChunkedLoss.apply(chunks, hidden, *chunks.trained)  # type: ignore[no-untyped-call]
        return total
    return torch.stack([chunks.without_gradients(part) for part in chunks]).sum()


def chunked_by_token(
    pending: Pending,
    function: OfTokens,
    others: tuple[torch.Tensor, ...],
    *,
    slices: Slices = token_slices,
) -> torch.Tensor:
    """What a function makes of each token's logits, [tokens]; gradients flow as from a chunked loss.

    Args:
        function: (logits [tokens, vocabulary], a row of each of `others`) -> [tokens]; what it
            makes of one token depends on that token alone.
        others: tensors [..., tokens, ...], or the deferred logits of a model that is not trained.
    """
    outer = pending.hidden.dim() - 1

    def rows_of(other: torch.Tensor) -> Callable[[slice], torch.Tensor]:
        if not isinstance(other, DeferredLogits):
            rows = other.flatten(0, outer - 1)
            return lambda part: rows[part]

        beside = _Chunks.of(other.pending, slices, lambda logits, _: logits)
        return beside.without_gradients

    makers = [rows_of(other) for other in others]

    def numbers(logits: torch.Tensor, part: slice) -> torch.Tensor:
        return function(logits, *(make(part) for make in makers))

    chunks = _Chunks.of(pending, slices, numbers)
    if _needs_gradients(chunks):
        hidden = pending.hidden.reshape(chunks.hidden.shape)
        values: torch.Tensor = _ChunkedByToken.apply(chunks, hidden, *chunks.trained)  # type: ignore[no-untyped-call]
        return values

    values = _number_for_each(chunks)
    for part in chunks:
        values[part] = chunks.without_gradients(part)
    return values


def _needs_gradients(chunks: _Chunks) -> bool:
    if not torch.is_grad_enabled():
        return False
    return chunks.pending.hidden.requires_grad or bool(chunks.trained)


def _number_for_each(chunks: _Chunks) -> torch.Tensor:
    """Zeros, which also tokens that no chunk of a trace covers have."""
    return torch.zeros(len(chunks.hidden), dtype=torch.float32, device=chunks.hidden.device)


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
            total += add(chunks, part, sums, gradient, None)

        # Not save_for_backward: hooks of activation offloading are for activations.
        ctx.gradients = [gradient, *sums.values()]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        gradients = _once(ctx)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(upstream[0])
        return None, *gradients


class _ChunkedByToken(torch.autograd.Function):
    """A number of each token; what the loss makes of it is known in the backward alone.

    The gradient of a token's hidden states is that of its number, times what comes from above: it
    is made in the forward, where the logits are. That of a trained head is a sum over tokens, each
    times its own number from above: the backward computes the chunks again.
    """

    @staticmethod
    def forward(
        ctx: Any, chunks: _Chunks, hidden: torch.Tensor, *trained: nn.Parameter
    ) -> torch.Tensor:
        values = _number_for_each(chunks)
        ctx.chunks = chunks
        ctx.trained = trained
        ctx.gradients = []
        if trained:
            ctx.autocast = _autocast_of(hidden)
            for part in chunks:
                values[part] = chunks.without_gradients(part)
            return values

        gradient = torch.empty_like(hidden)
        add = _add_plain if is_plain(chunks.pending.deferral) else _add_any
        for part in chunks:
            values[part] = add(chunks, part, {}, gradient, None)
        ctx.gradients = [gradient]
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.trained:
            (gradient,) = _once(ctx)
            assert gradient is not None, "tokens alone have gradients here"
            return None, gradient.mul_(upstream[0][:, None])

        chunks = ctx.chunks
        gradient = torch.empty_like(chunks.hidden) if ctx.needs_input_grad[1] else None
        sums: Sums = {parameter: torch.zeros_like(parameter) for parameter in ctx.trained}
        add = _add_plain if is_plain(chunks.pending.deferral) else _add_any
        with ctx.autocast:
            for part in chunks:
                add(chunks, part, sums, gradient, upstream[0][part])
        return None, gradient, *sums.values()


def _once(ctx: Any) -> list[torch.Tensor | None]:
    """The gradients that a forward made, which a backward gives away."""
    gradients: list[torch.Tensor | None] | None = ctx.gradients
    ctx.gradients = None
    if gradients is None:
        raise RuntimeError("the chunked loss was differentiated before, which freed its gradients.")
    return gradients


def _autocast_of(tensor: torch.Tensor) -> torch.autocast:
    """The formats that products are computed in now, for a backward, which forgets them."""
    device = tensor.device.type
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
    )


def is_plain(deferral: Deferral) -> bool:
    """Whether the head is a bare linear layer: no adapter, quantised or sharded weight, hook or
    wrapper."""
    weight: Any = deferral.head.weight
    return deferral.is_bare and not is_traceable_wrapper_subclass(weight)


def _add_plain(
    chunks: _Chunks,
    part: slice,
    sums: Sums,
    to_hidden: torch.Tensor | None,
    upstream: torch.Tensor | None,
) -> torch.Tensor:
    """By hand: autograd would make a whole weight's gradient per chunk before adding it.

    Returns the chunk's numbers; `upstream` weighs their gradients.
    """
    head: Any = chunks.pending.deferral.head
    rows = chunks.hidden[part]
    with _own_graph():
        with torch.no_grad():
            leaf = chunks.pending.raw(rows)
        leaf = leaf.requires_grad_()
        numbers = chunks.numbers(chunks.pending.finished(leaf), part)
        (gradient,) = torch.autograd.grad(_weighed(numbers, upstream), leaf)
    del leaf

    if to_hidden is not None:
        to_hidden[part].copy_(gradient @ head.weight)
    weight = sums.get(head.weight)
    bias = sums.get(head.bias)

    if weight is not None and weight.dtype == gradient.dtype == rows.dtype:
        weight.addmm_(gradient.t(), rows)
    elif weight is not None:
        weight += gradient.t() @ rows  # under autocast the product is in the low format
    if bias is not None:
        bias += gradient.sum(0)
    return numbers.detach()


def _add_any(
    chunks: _Chunks,
    part: slice,
    sums: Sums,
    to_hidden: torch.Tensor | None,
    upstream: torch.Tensor | None,
) -> torch.Tensor:
    """By autograd, through any head. Returns as `_add_plain`."""
    inputs: list[torch.Tensor] = list(sums)
    rows = chunks.hidden[part]
    with _own_graph():
        if to_hidden is not None:
            rows = rows.detach().requires_grad_()
            inputs.append(rows)
        numbers = chunks.numbers(chunks.pending.of(rows), part)
        gradients = list(torch.autograd.grad(_weighed(numbers, upstream), inputs))

    if to_hidden is not None:
        to_hidden[part].copy_(gradients.pop())
    for total, gradient in zip(sums.values(), gradients, strict=True):
        total += gradient
    return numbers.detach()


def _weighed(numbers: torch.Tensor, upstream: torch.Tensor | None) -> torch.Tensor:
    """The sum of numbers, each times what comes from above; a sum stays what it is."""
    if upstream is not None:
        return (numbers * upstream).sum()
    if numbers.dim():
        return numbers.sum()
    return numbers


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
