"""Tokens split over the devices of a context group: each computes with a part of every sample, and attention sees whole
samples of some of the heads (an exchange of heads: Jacobs et al. 2023, arXiv 2309.14509, Ulysses).

The model gets the rank's own tokens, their positions, and labels that were shifted before the cut. The loss that it
returns is that of the whole samples on every rank, with the gradient of the rank's own part.
"""

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

from autofit.core.errors import InputError, RefusedError
from autofit.setup.flash_attn import put_back
from autofit.setup.layers import repeated_blocks
from autofit.setup.split_layers import check_heads
from autofit.setup.state import Setup

_ONE = "use context_parallel 1"
_NAME = "autofit_exchange"  # in transformers' register of attentions
_IGNORED = -100
_MIXING = {"full_attention", "sliding_attention"}  # layers whose attention alone mixes tokens
_CUT = ("input_ids", "labels", "attention_mask")
_PASSED = ("dropout", "scaling", "is_causal", "sliding_window", "softcap")


def split_tokens(setup: Setup, *, checked: bool = False) -> None:
    """Cut what the model gets, and exchange heads around its attention, once that and the loss are what they will be.
    `checked`: the loss is known to take shifted labels. Raises RefusedError where tokens also meet elsewhere, or heads
    cannot be divided."""
    layout = setup.ranks.layout
    _check(setup.model, layout.context * layout.tensor)
    setup.when_built.append(partial(_install, setup, checked))


def _install(setup: Setup, checked: bool) -> None:
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model: Any = setup.model
    group = setup.ranks.context
    before = model.config._attn_implementation
    assert group is not None, "one device splits nothing"
    split = _Split(group, len(repeated_blocks(model)), ALL_ATTENTION_FUNCTIONS[before], checked)
    AttentionInterface.register(_NAME, split.attend)
    model.set_attn_implementation(_NAME)
    setup.on_close(partial(put_back, model, before))
    setup.on_close(model.register_forward_pre_hook(split.cut, with_kwargs=True).remove)
    setup.on_close(model.register_forward_hook(split.whole_loss).remove)


def _check(model: Any, degree: int) -> None:
    name = type(model).__name__
    takes = inspect.signature(model.forward).parameters.values()
    kinds = {each.kind for each in takes}
    kind = (
        model.config._attn_implementation
        if getattr(model, "_supports_attention_backend", False)
        else "eager"
    )
    if kind == "eager":  # a function of the model's own code
        raise RefusedError(f"the attention of {name} cannot be exchanged for another; {_ONE}.")
    if (
        getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss"
        or inspect.Parameter.VAR_KEYWORD not in kinds
    ):
        raise RefusedError(
            f"{name} computes its loss in a way of its own, which needs all tokens; {_ONE}."
        )
    text = model.config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _MIXING
    if others or any(isinstance(each, nn.Conv1d) for each in model.modules()):
        raise RefusedError(f"not only attention mixes the tokens of {name}; {_ONE}.")
    if getattr(text, "output_router_logits", False):
        raise RefusedError(
            f"the loss of the router needs all tokens; set output_router_logits to false, or {_ONE}."
        )
    check_heads(model, degree)


class _Split:
    """How one rank sees the batches and the attention of a model."""

    def __init__(
        self, group: dist.ProcessGroup, blocks: int, attention: Any, checked: bool = False
    ) -> None:
        self._group = group
        self._blocks = blocks
        self._attention = attention
        self._degree = group.size()
        self._calls = 0
        self._checked = checked

    def cut(
        self, model: nn.Module, inputs: tuple[Any, ...], batch: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """This rank's tokens of a batch. What is padded at the end needs no mask: no token sees one after it."""
        self._calls = 0
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        shapes = {value.shape for value in tensors.values()}
        if inputs or len(shapes) != 1 or not {"input_ids", "labels"} <= tensors.keys() <= set(_CUT):
            given = ", ".join(tensors) or "none"
            message = f"context_parallel cuts batches of {', '.join(_CUT)} of one shape, and was given {given}"
            raise InputError(f"{message}.", f"Leave out what can be, without packing, or {_ONE}.")
        labels = functional.pad(tensors["labels"][:, 1:], (0, 1), value=_IGNORED)
        if (mask := tensors.get("attention_mask")) is not None:
            padded = mask == 0
            if (padded[:, :-1] & ~padded[:, 1:]).any() or (labels[padded] != _IGNORED).any():
                message = "context_parallel takes samples that are padded at the end, with labels of -100 there"
                raise InputError(f"{message}.", "Set the tokenizer's padding_side to right.")
        size = -(-labels.shape[1] // self._degree)
        start = self._group.rank() * size
        missing = size * self._degree - labels.shape[1]
        own_ids, own_labels = (
            functional.pad(tensor, (0, missing), value=value)[:, start : start + size]
            for tensor, value in ((tensors["input_ids"], 0), (labels, _IGNORED))
        )
        own = {
            "input_ids": own_ids,
            "position_ids": torch.arange(start, start + size, device=own_ids.device).unsqueeze(0),
            # not read where the loss takes shifted ones
            "labels": torch.full_like(own_labels, _IGNORED),
            "shift_labels": own_labels.contiguous(),
            "num_items_in_batch": (labels != _IGNORED).sum().clamp(min=1),
        }
        return (), {name: value for name, value in batch.items() if name not in tensors} | own

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention over all tokens, of this rank's share of the heads."""
        self._calls += 1
        of_heads = [attention_mask, *(options.get(name) for name in ("s_aux", "position_bias"))]
        if any(each is not None for each in of_heads):
            raise RefusedError(
                f"this attention has a mask or sinks of its own, which are not exchanged; {_ONE}."
            )
        if not options.get("is_causal", getattr(module, "is_causal", True)):
            raise RefusedError(f"this attention also looks ahead; {_ONE}.")
        query, key, value = (self._exchanged(each) for each in (query, key, value))
        tokens = query.shape[2]
        window = options.get("sliding_window")
        mask = None
        if window and window < tokens and "flash" not in self._attention.__name__:
            far = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
            mask = far.tril() & ~far.tril(-window)
        passed = {name: options[name] for name in _PASSED if name in options}
        seen, _ = self._attention(module, query, key, value, mask, **passed)
        return self._exchanged(seen), None

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, heads, own tokens, ...) -> (batch, own heads, tokens, ...), or the other way round with (batch,
        tokens, own heads, ...)."""
        parts = tensor.unflatten(1, (self._degree, -1)).movedim(1, 0).contiguous()
        received: torch.Tensor = all_to_all_single_autograd(parts, None, None, self._group)
        return received.movedim(0, 2).flatten(2, 3)

    def whole_loss(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        """The output with the loss of all tokens. Its gradient is this rank's, times the ranks: fsdp takes a mean."""
        name = type(model).__name__.removeprefix("FSDP")
        if self._calls != self._blocks:
            message = f"{self._calls} attentions ran in the {self._blocks} blocks of {name}"
            raise RefusedError(
                f"{message}, which mixes tokens in ways that cannot be split; {_ONE}."
            )
        own = output["loss"]
        total = own.detach().clone()
        dist.all_reduce(total, group=self._group)
        if not self._checked and not total:
            raise RefusedError(f"the loss of {name} does not take shifted labels; {_ONE}.")
        self._checked = True
        output["loss"] = total + self._degree * (own - own.detach())
        return output
