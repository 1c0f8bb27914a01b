"""The output head of a transformers causal language model, and logits that stay uncomputed until somebody asks.

Such a model computes `logits = head(hidden)`, scales or soft-caps them, and hands them to its `loss_function`. Here the
head returns a stand-in that holds the hidden states and notes what the model does to it, whatever that is for this
kind of model; a loss can then make the logits of some tokens at a time. Anything else that touches the stand-in gets
the real logits, so an output's `logits` stay what they are; that they were needed is counted, for then nothing is won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map, tree_map_only

from autofit.core.errors import RefusedError
from autofit.setup.layers import output_head
from autofit.setup.state import Setup

FEW_TOKENS = 16  # as many are enough to tell one loss from another
NO_HEAD = "the model is not a causal language model of transformers with a linear output head; use standard."
SummedLoss = Callable[["Pending", torch.Tensor, int], torch.Tensor]  # (logits to be, classes, ignored class) -> sum

# What a model does to each logit by itself, by the name of torch's function. `to` and indexing are looked at closer.
_ELEMENTWISE = {"mul", "div", "true_divide", "add", "sub", "neg", "tanh", "float", "contiguous", "to", "__getitem__"}
_PROPERTIES: tuple[Any, ...] = (torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.device, torch.Tensor.ndim)
_FACTS = {*(each.__get__ for each in _PROPERTIES), torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}


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
    """The head whose logits are put off while `active`; `computed` counts how often all of them were needed.

    `forward` is what stands in the place of the head's own; `wrapped` says that something stood there before.
    """

    head: nn.Module
    active: bool = False
    computed: int = 0
    wrapped: bool = False
    forward: Callable[..., Any] | None = None

    @property
    def own_forward(self) -> bool:
        """Whether the head's class alone says what it computes: nobody has wrapped its forward, before or since."""
        return not self.wrapped and vars(self.head).get("forward") is self.forward

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the head computes."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before


@dataclass(frozen=True)
class Pending:
    """Logits to be: of these hidden states, by this head, after these steps."""

    deferral: Deferral
    hidden: torch.Tensor
    steps: tuple[Step, ...] = field(default=())

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of other hidden states, made as these would be."""
        return self.finished(self.raw(hidden))

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes out of the head, with its own hooks run."""
        with self.deferral.paused():
            logits: torch.Tensor = self.deferral.head(hidden)
        return logits

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of that which comes out of the head."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def all(self) -> torch.Tensor:
        """All of them."""
        self.deferral.computed += 1
        return self.of(self.hidden)


class DeferredLogits(torch.Tensor):
    """A tensor without storage in the place of logits: it knows its shape, and computes itself when it is used."""

    pending: Pending

    @staticmethod
    def __new__(cls, pending: Pending, shape: tuple[int, ...], dtype: torch.dtype) -> DeferredLogits:
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
            return args[0]._after(Step(func, _for_rows(func, args[1:]), kwargs))
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.pending.all(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)  # what came past it

    def _after(self, step: Step) -> DeferredLogits:
        """The same with one step more; what that does to dtype and vocabulary is tried on a tensor of no tokens."""
        tried = step(torch.empty((0, self.shape[-1]), dtype=self.dtype, device=self.device))
        pending = replace(self.pending, steps=(*self.pending.steps, step))
        return DeferredLogits(pending, (*self.shape[:-1], tried.shape[-1]), tried.dtype)


def _is_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name not in _ELEMENTWISE or not args or not isinstance(args[0], DeferredLogits):
        return False
    if name == "__getitem__":  # part of the vocabulary
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        whole = all(each is Ellipsis or each == slice(None) for each in index[:-1])
        reaches = Ellipsis in index[:-1] or len(index) == args[0].dim()
        return whole and reaches and isinstance(index[-1], slice)
    others = [*args[1:], *kwargs.values()]
    if name == "to":
        return all(isinstance(each, torch.dtype) for each in others)
    # A learned scale would need a gradient of its own, and a tensor of several elements may differ from token to token.
    tensors = [each for each in others if isinstance(each, torch.Tensor)]
    return all(each.dim() == 0 and not each.requires_grad for each in tensors)


def _for_rows(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Indices are written for (batch, tokens, vocabulary), and replayed on (tokens, vocabulary)."""
    return ((Ellipsis, args[0][-1]),) if func.__name__ == "__getitem__" else args


def defer_logits(setup: Setup, summed_loss: SummedLoss) -> Deferral:
    """Put the logits off wherever the model is given labels, and compute its loss by `summed_loss`.

    Raises:
        RefusedError: not a model that this can be done with.
    """
    model: Any = setup.model
    head: Any = output_head(model)
    standard: Any = getattr(model, "loss_function", None)
    if not isinstance(getattr(head, "out_features", None), int) or _name(standard) != "ForCausalLMLoss":
        raise RefusedError(NO_HEAD)
    deferral = Deferral(head, wrapped="forward" in vars(head))
    deferral.forward = _deferring(deferral, head.forward)
    _replace(setup, head, "forward", deferral.forward)
    _replace(setup, model, "_loss_function", _causal_lm_loss(standard, summed_loss))

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        deferral.active = _given_labels(module, args, kwargs)

    def end(*_: Any) -> None:
        deferral.active = False

    setup.on_close(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
    setup.on_close(model.register_forward_hook(end, always_call=True).remove)
    return deferral


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


def _replace(setup: Setup, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of the instance, until the setup is closed."""
    if name in owner.__dict__:
        setup.on_close(partial(setattr, owner, name, owner.__dict__[name]))
    else:
        setup.on_close(partial(delattr, owner, name))
    setattr(owner, name, value)


def _given_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if args and "labels" not in kwargs:
        kwargs = signature(module.forward).bind_partial(*args, **kwargs).arguments
    return kwargs.get("labels") is not None


def _deferring(deferral: Deferral, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The head's forward, which puts its work off while it should."""
    features: Any = deferral.head.out_features

    @wraps(inner)
    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not deferral.active:
            return inner(hidden, *args, **kwargs)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        return DeferredLogits(Pending(deferral, hidden), (*hidden.shape[:-1], features), dtype)

    return _outside_of_compiled_code(forward)


def _causal_lm_loss(standard: Callable[..., Any], summed_loss: SummedLoss) -> Callable[..., Any]:
    """transformers' loss of causal language models, from logits that are still to be computed."""

    @wraps(standard)
    def loss(logits: torch.Tensor, labels: Any, vocab_size: int | None = None, **options: Any) -> Any:
        if not isinstance(logits, DeferredLogits) or logits.shape[-1] != vocab_size:
            return standard(logits, labels, vocab_size, **options)
        ignored = options.get("ignore_index", -100)
        wanted = options.get("shift_labels")
        if wanted is None:  # the token at one place is predicted from those before it
            wanted = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        wanted = wanted.reshape(-1).to(logits.device)
        total = summed_loss(logits.pending, wanted, ignored)
        count = options.get("num_items_in_batch")
        if count is None:
            count = (wanted != ignored).sum()
        return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)

    return _outside_of_compiled_code(loss)


def _outside_of_compiled_code(function: Callable[..., Any]) -> Callable[..., Any]:
    disable: Any = torch.compiler.disable
    plain: Callable[..., Any] = disable(function)
    return plain


@torch.no_grad()
def loss_of_few_tokens(setup: Setup) -> float:
    """The loss of one sample cut to a few tokens, without dropout; NaN where a batch is no mapping of tensors.

    To be compared before and after something was changed about the model. No label is ignored.

    Raises:
        RefusedError: the model gives no loss.
    """
    workload, model = setup.workload, setup.model
    batch = workload.batch(1)
    if not isinstance(batch, Mapping):
        return float("nan")
    on_device = tree_map(partial(_few, device=setup.device, length=workload.sequence_length), dict(batch))
    if isinstance(on_device.get("labels"), torch.Tensor) and not on_device["labels"].is_floating_point():
        on_device["labels"] = on_device["labels"].clamp(min=0)
    was_training = model.training
    model.eval()
    try:
        with setup.step_context(), setup.forward_context():
            output = workload.loss(model, on_device) if workload.loss else model(**on_device)
    finally:
        model.train(was_training)
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        message = "the model gives no loss for these batches (labels by another name, or return_dict=False?)"
        raise RefusedError(f"{message}, so this cannot be compared with it; use loss standard and kernels none.")
    return float(loss)


def _few(value: Any, device: torch.device, length: int | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    cut = value[:, :FEW_TOKENS] if value.dim() > 1 and value.shape[1] == length else value
    return cut.to(device)
