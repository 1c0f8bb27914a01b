"""Deferred logits: a transformers causal LM whose output head computes nothing until its logits are
used.

Such a model computes `logits = head(hidden)`, scales or soft-caps them, and passes them to its
`loss_function`, or returns them to a loss of one's own. Here the head returns a stand-in that holds
the hidden states and records what the model does to it; a loss can then make the logits of some
tokens at a time. Any other use of the stand-in computes the real logits, so `output.logits` stays
what it is; such uses are counted, for then nothing is saved.
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
from autofit.setup.model_part import forward_alone
from autofit.setup.state import Setup, evaluation_mode

FEW_TOKENS = 16  # enough to tell one loss from another
NO_HEAD = (
    "the model is not a causal language model of transformers with a linear output head; "
    "use standard."
)
# (pending logits, classes, ignored class) -> sum
SummedLoss = Callable[["Pending", torch.Tensor, int], torch.Tensor]
# (logits [tokens, vocabulary], rows of other tensors [tokens, ...]) -> a number for each token
OfTokens = Callable[..., torch.Tensor]
# (pending logits, function, other tensors or deferred logits) -> a number for each token
ByToken = Callable[["Pending", OfTokens, tuple[torch.Tensor, ...]], torch.Tensor]

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
# What a tensor tells of itself without its values.
_PROPERTIES: tuple[Any, ...] = (
    torch.Tensor.shape,
    torch.Tensor.dtype,
    torch.Tensor.device,
    torch.Tensor.ndim,
    torch.Tensor.requires_grad,  # which FSDP asks of all that a layer returns
)
_FACTS = {
    *(fact.__get__ for fact in _PROPERTIES),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
}
_FSDP = "torch.distributed.fsdp"


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
    """A head that may defer its logits.

    Attributes:
        active: whether it does.
        computed: how often all logits were needed.
        wrapped: whether the instance's forward was already replaced before.
        forward: what replaces the head's own.
        by_token: how a loss of one's own is told numbers that each token's logits make.
    """

    head: nn.Module
    active: bool = False
    computed: int = 0
    wrapped: bool = False
    forward: Callable[..., Any] | None = None
    by_token: ByToken | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the head is a linear layer with its own forward, and no hooks but those of FSDP
        and of ours."""
        # replaced by somebody else, before or since
        if self.wrapped or vars(self.head).get("forward") is not self.forward:
            return False

        for hooks in _hooks_of(self.head):
            for hook in hooks.values():
                if not _is_of(hook, _FSDP, "autofit."):
                    return False

        kind, *bases = type(self.head).__mro__
        if issubclass(kind, FSDPModule):
            kind = bases[1]  # fully_shard makes a class of FSDPModule and the module's own
        return kind is nn.Linear

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the head compute, with weights that FSDP gathered when the model called it."""
        before = self.active
        self.active = False
        changed = []
        if isinstance(self.head, FSDPModule):
            changed = [(hooks, dict(hooks)) for hooks in _hooks_of(self.head)]

        for hooks, given in changed:
            for key, hook in given.items():
                if _is_of(hook, _FSDP):
                    del hooks[key]

        try:
            yield
        finally:
            self.active = before
            for hooks, given in changed:
                hooks.clear()
                hooks.update(given)

    def gather(self) -> None:
        """Have the weights that FSDP divides, which may have been given up since the forward."""
        if isinstance(self.head, FSDPModule):
            self.head.unshard()

    def release(self) -> None:
        """Give up gathered weights: neither chunks nor kernels need them for the backward."""
        if isinstance(self.head, FSDPModule):
            self.head.reshard()


@dataclass(frozen=True)
class Pending:
    """Logits not yet computed.

    Attributes:
        deferral: of the head that computes them.
        hidden: the states that it computes them of: (..., features).
        steps: what the model does to the head's output.
    """

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
            others = args[1:]
            if func.__name__ == "__getitem__":
                # Indices are written for (batch, tokens, vocabulary), and replayed on
                # (tokens, vocabulary).
                others = ((Ellipsis, args[1][-1]),)
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

    def by_token(self, function: OfTokens, *others: torch.Tensor) -> torch.Tensor:
        """`function(logits, *others)` of each token, some tokens at a time: [..., tokens].

        Args:
            others: what belongs to each token, [..., tokens, ...]; or deferred logits.
        """
        by_token = self.pending.deferral.by_token
        assert by_token, "logits are deferred for the model's own loss alone"
        deferred = [each for each in (self, *others) if isinstance(each, DeferredLogits)]
        for logits in deferred:
            logits.pending.deferral.gather()

        values = by_token(self.pending, function, others)

        for logits in deferred:
            logits.pending.deferral.release()
        return values.view(self.shape[:-1])

    def _after(self, step: Step) -> DeferredLogits:
        """One more step; its effect on dtype and vocabulary is tried on a tensor of no tokens."""
        *outer, vocabulary = self.shape
        tried = step(torch.empty((0, vocabulary), dtype=self.dtype, device=self.device))
        steps = (*self.pending.steps, step)
        pending = replace(self.pending, steps=steps)
        return DeferredLogits(pending, (*outer, tried.shape[-1]), tried.dtype)


def _hooks_of(head: nn.Module) -> Iterator[dict[int, Any]]:
    """The dictionaries of a module's hooks around forward and backward."""
    yield head._forward_hooks
    yield head._forward_pre_hooks
    yield head._backward_hooks
    yield head._backward_pre_hooks


def _is_of(hook: Any, *modules: str) -> bool:
    """Whether the code of a hook is in one of some packages."""
    return str(getattr(hook, "__module__", "")).startswith(modules)


def _is_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call treats each logit by itself, and all tokens alike."""
    name = getattr(func, "__name__", "")
    if name not in _ELEMENTWISE or not args or not isinstance(args[0], DeferredLogits):
        return False

    if name == "__getitem__":
        return _is_part_of_vocabulary(args[0], args[1])

    others = [*args[1:], *kwargs.values()]
    if name == "to":
        return all(isinstance(other, torch.dtype) for other in others)

    # A learned scale would need its own gradient, and a tensor of several elements may vary by
    # token.
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    return not any(tensor.dim() or tensor.requires_grad for tensor in tensors)


def _is_part_of_vocabulary(logits: DeferredLogits, index: Any) -> bool:
    """Whether an index takes a slice of the classes, of all tokens."""
    if not isinstance(index, tuple):
        index = (index,)
    outer = index[:-1]
    takes_all = all(part is Ellipsis or part == slice(None) for part in outer)
    reaches_last = Ellipsis in outer or len(index) == logits.dim()
    return takes_all and reaches_last and isinstance(index[-1], slice)


def defers_logits(model: nn.Module) -> bool:
    """Whether a model is a causal LM of transformers with a linear head, also inside a
    PeftModel."""
    base: Any = base_of(model)
    if not isinstance(getattr(output_head(base), "out_features", None), int):
        return False
    loss = getattr(base, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"


def defer_logits(setup: Setup, summed_loss: SummedLoss) -> Deferral:
    """Defer the logits whenever the model is given labels, and compute its loss by `summed_loss`.

    Raises:
        RefusedError: where the model is not a causal LM of transformers with a linear head.
    """
    deferral = _defer_head(setup, setup.model)
    model: Any = base_of(setup.model)  # which computes the loss, also inside a PeftModel
    setup.patch(model, "_loss_function", _causal_lm_loss(model.loss_function, summed_loss))

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if args and "labels" not in kwargs:
            kwargs = signature(module.forward).bind_partial(*args, **kwargs).arguments
        deferral.active = kwargs.get("labels") is not None

    _during_forwards(setup, setup.model, deferral, begin)
    return deferral


def defer_to_loss(setup: Setup, model: nn.Module, by_token: ByToken) -> Deferral:
    """Defer the logits of one of the models that a loss of one's own asks, which reads them by
    `by_token` of what it gets.

    Raises:
        RefusedError: where the model is not a causal LM of transformers with a linear head.
    """
    deferral = _defer_head(setup, model)
    deferral.by_token = by_token

    def begin(*_: Any) -> None:
        deferral.active = True

    _during_forwards(setup, model, deferral, begin)
    return deferral


def _defer_head(setup: Setup, model: nn.Module) -> Deferral:
    """Let a model's head defer its logits while that is active."""
    base = base_of(model)
    if not defers_logits(base):
        raise RefusedError(NO_HEAD)

    head: Any = output_head(base)
    deferral = Deferral(head, wrapped="forward" in vars(head))
    deferral.forward = _deferring(deferral, head.forward)
    setup.patch(head, "forward", deferral.forward)
    return deferral


def _during_forwards(
    setup: Setup, model: nn.Module, deferral: Deferral, begin: Callable[..., None]
) -> None:
    """Have `begin` say at each forward whether the logits are deferred; afterwards they are not."""

    def end(*_: Any) -> None:
        deferral.active = False

    # Of the outer model: a PeftModel runs the forward of the inner one without its hooks.
    setup.on_close(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
    setup.on_close(model.register_forward_hook(end, always_call=True).remove)


def _deferring(deferral: Deferral, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The head's forward, which returns deferred logits while the deferral is active."""
    features: Any = deferral.head.out_features

    @wraps(inner)
    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not deferral.active:
            return inner(hidden, *args, **kwargs)

        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        shape = (*hidden.shape[:-1], features)
        return DeferredLogits(Pending(deferral, hidden), shape, dtype)

    return torch.compiler.disable(forward)  # type: ignore[no-any-return]


def _causal_lm_loss(standard: Callable[..., Any], summed_loss: SummedLoss) -> Callable[..., Any]:
    """The model's loss function, by `summed_loss` where the logits are deferred ones."""

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
        if isinstance(count, torch.Tensor):
            count = count.to(total.device)
        return total / count

    return torch.compiler.disable(loss)  # type: ignore[no-any-return]


@torch.no_grad()
def loss_of_few_tokens(setup: Setup, batch: Any) -> float:
    """The loss of a batch cut to a few tokens, to compare a model before and after a change.

    Without dropout or ignored labels. NaN where a batch is no mapping of tensors. On a stage of a
    pipeline without a loss, the norm of what it passes on.

    Raises:
        RefusedError: where the model returns no loss.
    """
    workload = setup.workload
    model = setup.model
    if not isinstance(batch, Mapping):
        return float("nan")

    def few(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 1 and tensor.shape[1] == workload.sequence_length:
            tensor = tensor[:, :FEW_TOKENS]
        return tensor.to(setup.device)

    on_device = tree_map_only(torch.Tensor, few, dict(batch))
    labels = on_device.get("labels")
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
        on_device["labels"] = labels.clamp(min=0)

    def forward() -> Any:
        return workload.loss(model, on_device) if workload.loss else model(**on_device)

    with evaluation_mode(model), setup.step_context(), setup.forward_context():
        output = forward_alone(model, setup.part, forward)
    setup.exchange.reshard()

    if setup.part is not None and not setup.part.is_last:
        return float(output.float().norm())
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise RefusedError(
            "the model returns no loss to compare with (labels by another name, or "
            "return_dict=False?); use loss standard and kernels none."
        )
    return float(loss)
