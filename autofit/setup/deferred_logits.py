"""Deferred logits: a transformers causal LM whose output head computes nothing until its logits are used.

Such a model computes `logits = head(hidden)`, scales or soft-caps them, and passes them to its `loss_function`. Here
the head returns a stand-in that holds the hidden states and records what the model does to it; a loss can then make the
logits of some tokens at a time. Any other use of the stand-in computes the real logits, so `output.logits` stays what
it is; such uses are counted, for then nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from autofit.core.errors import RefusedError
from autofit.setup.adapters import base_of
from autofit.setup.layers import output_head
from autofit.setup.state import Setup, evaluation_mode

FEW_TOKENS = 16  # enough to tell one loss from another
NO_HEAD = "the model is not a causal language model of transformers with a linear output head; use standard."
# (pending logits, classes, ignored class) -> sum
SummedLoss = Callable[["Pending", torch.Tensor, int], torch.Tensor]

# Functions of torch that treat each logit by itself. `to` and indexing are checked further.
_ELEMENTWISE = {
    "mul",
    "div",
    "true_divide",
    "add",
    "sub",
    "neg",
    "tanh",
    "float",
    "contiguous",
    "to",
    "__getitem__",
}
_PROPERTIES: tuple[Any, ...] = (
    torch.Tensor.shape,
    torch.Tensor.dtype,
    torch.Tensor.device,
    torch.Tensor.ndim,
)
_PROPERTIES += (torch.Tensor.requires_grad,)  # which FSDP asks of all that a layer returns
_FSDP = "torch.distributed.fsdp"
_FACTS = {
    *(each.__get__ for each in _PROPERTIES),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
}


@dataclass(frozen=True)
class Step:
    """One operation between the head and the loss: `function(logits, *args, **kwargs)`."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.function(logits, *self.args, **self.kwargs)


@dataclass
class Deferral:
    """A head that defers its logits while `active`; `computed` counts how often all of them were needed. `forward`
    replaces the head's own; `wrapped` says that the instance's forward was already replaced before."""

    head: nn.Module
    active: bool = False
    computed: int = 0
    wrapped: bool = False
    forward: Callable[..., Any] | None = None

    @property
    def own_forward(self) -> bool:
        """Whether nobody else has replaced the head's forward, before or since."""
        return not self.wrapped and vars(self.head).get("forward") is self.forward

    @property
    def is_bare(self) -> bool:
        """Whether the head is a linear layer with its own forward, and no hooks but those of FSDP and of ours."""
        head = self.head
        kinds = type(self.head).__mro__
        others = [
            hook
            for hooks in _hooks_of(head)
            for hook in hooks.values()
            if not _is_of(hook, _FSDP, "autofit.")
        ]
        kind = kinds[2] if issubclass(kinds[0], FSDPModule) else kinds[0]
        return kind is nn.Linear and self.own_forward and not others

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the head compute, with weights that FSDP gathered when the model called it."""
        before = self.active
        self.active = False
        hooks = _hooks_of(self.head) if isinstance(self.head, FSDPModule) else ()
        all_of = [dict(each) for each in hooks]
        for each in hooks:
            for key in [key for key, hook in each.items() if _is_of(hook, _FSDP)]:
                del each[key]
        try:
            yield
        finally:
            self.active = before
            for each, whole in zip(hooks, all_of, strict=True):
                each.clear()
                each.update(whole)

    def release(self) -> None:
        """Give up gathered weights: neither chunks nor kernels need them for the backward."""
        if isinstance(self.head, FSDPModule):
            self.head.reshard()


@dataclass(frozen=True)
class Pending:
    """Logits not yet computed: of these hidden states, by this head, after these steps."""

    deferral: Deferral
    hidden: torch.Tensor
    steps: tuple[Step, ...] = field(default=())

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of other hidden states, computed the same way."""
        return self.finished(self.raw(hidden))

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output, its hooks included."""
        with self.deferral.paused():
            logits: torch.Tensor = self.deferral.head(hidden)
        return logits

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, from the head's output."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def all(self) -> torch.Tensor:
        """All logits."""
        self.deferral.computed += 1
        return self.of(self.hidden)


class DeferredLogits(torch.Tensor):
    """Stands for logits: a tensor with shape and dtype but no storage, computed when used."""

    pending: Pending

    @staticmethod
    def __new__(
        cls, pending: Pending, shape: tuple[int, ...], dtype: torch.dtype
    ) -> DeferredLogits:
        make: Any = torch.Tensor._make_wrapper_subclass
        logits: DeferredLogits = make(cls, shape, dtype=dtype, device=pending.hidden.device)
        logits.pending = pending
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _is_elementwise(func, args, kwargs):
            # Indices are written for (batch, tokens, vocabulary), and replayed on (tokens, vocabulary).
            others = ((Ellipsis, args[1][-1]),) if func.__name__ == "__getitem__" else args[1:]
            return args[0]._after(Step(func, others, kwargs))
        args, kwargs = tree_map_only(
            DeferredLogits, lambda logits: logits.pending.all(), (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # calls that bypass __torch_function__
        return cls.__torch_function__(func, types, args, kwargs)

    def _after(self, step: Step) -> DeferredLogits:
        """One more step; its effect on dtype and vocabulary is tried on a tensor of no tokens."""
        tried = step(torch.empty((0, self.shape[-1]), dtype=self.dtype, device=self.device))
        pending = replace(self.pending, steps=(*self.pending.steps, step))
        return DeferredLogits(pending, (*self.shape[:-1], tried.shape[-1]), tried.dtype)


def _hooks_of(head: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        head._forward_hooks,
        head._forward_pre_hooks,
        head._backward_hooks,
        head._backward_pre_hooks,
    )


def _is_of(hook: Any, *modules: str) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(modules)


def _is_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name not in _ELEMENTWISE or not args or not isinstance(args[0], DeferredLogits):
        return False
    if name == "__getitem__":  # part of the vocabulary
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        whole = all(part is Ellipsis or part == slice(None) for part in index[:-1])
        reaches = Ellipsis in index[:-1] or len(index) == args[0].dim()
        return whole and reaches and isinstance(index[-1], slice)
    others = [*args[1:], *kwargs.values()]
    if name == "to":
        return all(isinstance(other, torch.dtype) for other in others)
    # A learned scale would need its own gradient, and a tensor of several elements may vary by token.
    return not any(
        isinstance(other, torch.Tensor) and (other.dim() or other.requires_grad) for other in others
    )


def defers_logits(model: nn.Module) -> bool:
    """Whether a model is a causal LM of transformers with a linear head, also inside a PeftModel."""
    base: Any = base_of(model)
    linear = isinstance(getattr(output_head(base), "out_features", None), int)
    return (
        linear
        and getattr(getattr(base, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    )


def defer_logits(setup: Setup, summed_loss: SummedLoss) -> Deferral:
    """Defer the logits whenever the model is given labels, and compute its loss by `summed_loss`. Raises RefusedError
    where the model is not a causal LM of transformers with a linear head."""
    model: Any = base_of(setup.model)  # which computes the loss, also inside a PeftModel
    if not defers_logits(model):
        raise RefusedError(NO_HEAD)
    head: Any = output_head(model)
    standard = model.loss_function
    deferral = Deferral(head, wrapped="forward" in vars(head))
    deferral.forward = _deferring(deferral, head.forward)
    setup.patch(head, "forward", deferral.forward)
    setup.patch(model, "_loss_function", _causal_lm_loss(standard, summed_loss))

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if args and "labels" not in kwargs:
            kwargs = signature(module.forward).bind_partial(*args, **kwargs).arguments
        deferral.active = kwargs.get("labels") is not None

    def end(*_: Any) -> None:
        deferral.active = False

    # Of the outer model: a PeftModel runs the forward of the inner one without its hooks.
    setup.on_close(setup.model.register_forward_pre_hook(begin, with_kwargs=True).remove)
    setup.on_close(setup.model.register_forward_hook(end, always_call=True).remove)
    return deferral


def _deferring(deferral: Deferral, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The head's forward, which returns deferred logits while the deferral is active."""
    features: Any = deferral.head.out_features

    @wraps(inner)
    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not deferral.active:
            return inner(hidden, *args, **kwargs)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        return DeferredLogits(Pending(deferral, hidden), (*hidden.shape[:-1], features), dtype)

    return torch.compiler.disable(forward)  # type: ignore[no-any-return]


def _causal_lm_loss(standard: Callable[..., Any], summed_loss: SummedLoss) -> Callable[..., Any]:
    @wraps(standard)
    def loss(
        logits: torch.Tensor, labels: Any, vocab_size: int | None = None, **options: Any
    ) -> Any:
        if not isinstance(logits, DeferredLogits) or logits.shape[-1] != vocab_size:
            return standard(logits, labels, vocab_size, **options)
        ignored = options.get("ignore_index", -100)
        classes = options.get("shift_labels")
        if classes is None:  # each token is predicted from those before it
            classes = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        classes = classes.reshape(-1).to(logits.device)
        total = summed_loss(logits.pending, classes, ignored)
        logits.pending.deferral.release()
        count = options.get("num_items_in_batch")
        if count is None:
            count = (classes != ignored).sum()
        return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)

    return torch.compiler.disable(loss)  # type: ignore[no-any-return]


@torch.no_grad()
def loss_of_few_tokens(setup: Setup, batch: Any) -> float:
    """The loss of a batch cut to a few tokens, to compare a model before and after a change. Without dropout or
    ignored labels. NaN where a batch is no mapping of tensors. Raises RefusedError where the model returns no loss."""
    workload = setup.workload
    model = setup.model
    if not isinstance(batch, Mapping):
        return float("nan")

    def few(tensor: torch.Tensor) -> torch.Tensor:
        cut = tensor.dim() > 1 and tensor.shape[1] == workload.sequence_length
        return (tensor[:, :FEW_TOKENS] if cut else tensor).to(setup.device)

    on_device = tree_map_only(torch.Tensor, few, dict(batch))
    if (
        isinstance(on_device.get("labels"), torch.Tensor)
        and not on_device["labels"].is_floating_point()
    ):
        on_device["labels"] = on_device["labels"].clamp(min=0)
    with evaluation_mode(model), setup.step_context(), setup.forward_context():
        output = workload.loss(model, on_device) if workload.loss else model(**on_device)
    setup.exchange.reshard()
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        message = "the model returns no loss to compare with (labels by another name, or return_dict=False?)"
        raise RefusedError(f"{message}; use loss standard and kernels none.")
    return float(loss)
