"""Tokens split over the devices of a context group: each computes with a part of every sample, and
attention sees whole samples of some of the heads (an exchange of heads: Jacobs et al. 2023, arXiv
2309.14509, Ulysses).

The model gets the rank's own tokens, their positions, and labels that were shifted before the cut.
The loss that it returns is that of the whole samples on every rank, with the gradient of the rank's
own part.
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

_NAME = "autofit_exchange"  # in transformers' register of attentions
_IGNORED = -100
_MIXING = {"full_attention", "sliding_attention"}  # layers whose attention alone mixes tokens
_CUT = ("input_ids", "labels", "attention_mask")
_PASSED = ("dropout", "scaling", "is_causal", "sliding_window", "softcap")


def split_tokens(setup: Setup, *, checked: bool = False) -> None:
    """Cut what the model gets, and exchange heads around its attention, once that and the loss are
    what they will be.

    Args:
        checked: the loss is known to take shifted labels.

    Raises:
        RefusedError: where tokens also meet elsewhere, or heads cannot be divided.
    """
    layout = setup.ranks.layout
    _check(setup.model, layout.context * layout.tensor)
    setup.when_built.append(partial(_install, setup, checked))


def _install(setup: Setup, checked: bool) -> None:
    """Exchange the model's attention, and cut what it gets, until the run is closed."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model: Any = setup.model
    group = setup.ranks.context
    assert group is not None, "one device splits nothing"
    before = model.config._attn_implementation
    split = _Split(group, len(repeated_blocks(model)), ALL_ATTENTION_FUNCTIONS[before], checked)

    AttentionInterface.register(_NAME, split.attend)
    model.set_attn_implementation(_NAME)
    setup.on_close(partial(put_back, model, before))
    setup.on_close(model.register_forward_pre_hook(split.cut, with_kwargs=True).remove)
    setup.on_close(model.register_forward_hook(split.whole_loss).remove)


def _check(model: Any, degree: int) -> None:
    """Raise a RefusedError where a model's tokens meet elsewhere than in attention."""
    name = type(model).__name__
    attention = "eager"
    if getattr(model, "_supports_attention_backend", False):
        attention = model.config._attn_implementation
    if attention == "eager":  # a function of the model's own code
        raise RefusedError(
            f"the attention of {name} cannot be exchanged for another; use context_parallel 1."
        )

    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    loss = getattr(model.loss_function, "__name__", "")
    if loss != "ForCausalLMLoss" or inspect.Parameter.VAR_KEYWORD not in kinds:
        raise RefusedError(
            f"{name} computes its loss in a way of its own, which needs all tokens; use "
            "context_parallel 1."
        )

    text = model.config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _MIXING
    if others or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise RefusedError(
            f"not only attention mixes the tokens of {name}; use context_parallel 1."
        )

    if getattr(text, "output_router_logits", False):
        raise RefusedError(
            "the loss of the router needs all tokens; set output_router_logits to false, or use "
            "context_parallel 1."
        )

    check_heads(model, degree)


class _Split:
    """How one rank sees the batches and the attention of a model.

    Args:
        blocks: how many attentions run in a forward.
        attention: transformers' function for all tokens of some heads.
        checked: the loss is known to take shifted labels.
    """

    def __init__(
        self, group: dist.ProcessGroup, blocks: int, attention: Any, checked: bool = False
    ) -> None:
        self._group = group
        self._degree = group.size()
        self._blocks = blocks
        self._attention = attention
        self._checked = checked
        self._calls = 0

    def cut(
        self, model: nn.Module, inputs: tuple[Any, ...], batch: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """This rank's tokens of a batch, as a hook before the model's forward.

        What is padded at the end needs no mask: no token sees one after it.

        Raises:
            InputError: for batches that cannot be cut.
        """
        self._calls = 0
        tensors = {}
        others = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                others[name] = value

        shapes = {value.shape for value in tensors.values()}
        is_known = {"input_ids", "labels"} <= tensors.keys() <= set(_CUT)
        if inputs or len(shapes) != 1 or not is_known:
            given = ", ".join(tensors) or "none"
            raise InputError(
                f"context_parallel cuts batches of {', '.join(_CUT)} of one shape, and was given "
                f"{given}.",
                "Leave out what can be, without packing, or use context_parallel 1.",
            )

        labels = functional.pad(tensors["labels"][:, 1:], (0, 1), value=_IGNORED)
        if "attention_mask" in tensors:
            _check_padding(tensors["attention_mask"], labels)

        ids = self._own_tokens(tensors["input_ids"], 0)
        own_labels = self._own_tokens(labels, _IGNORED)
        start = self._group.rank() * ids.shape[1]
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)

        own = {
            "input_ids": ids,
            "position_ids": positions.unsqueeze(0),
            # not read where the loss takes shifted ones
            "labels": torch.full_like(own_labels, _IGNORED),
            "shift_labels": own_labels.contiguous(),
            "num_items_in_batch": (labels != _IGNORED).sum().clamp(min=1),
        }
        return (), others | own

    def _own_tokens(self, tensor: torch.Tensor, padding: int) -> torch.Tensor:
        """This rank's part of (batch, tokens), which is padded to as many tokens for each rank."""
        tokens = tensor.shape[1]
        size = -(-tokens // self._degree)
        start = self._group.rank() * size
        padded = functional.pad(tensor, (0, size * self._degree - tokens), value=padding)
        return padded[:, start : start + size]

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention over all tokens, of this rank's share of the heads.

        Args:
            query, key, value: (batch, heads, own tokens, size).

        Returns:
            (batch, own tokens, heads, size), and no weights.
        """
        self._calls += 1
        of_heads = (attention_mask, options.get("s_aux"), options.get("position_bias"))
        if any(tensor is not None for tensor in of_heads):
            raise RefusedError(
                "this attention has a mask or sinks of its own, which are not exchanged; use "
                "context_parallel 1."
            )

        if not options.get("is_causal", getattr(module, "is_causal", True)):
            raise RefusedError("this attention also looks ahead; use context_parallel 1.")

        query = self._exchanged(query)
        key = self._exchanged(key)
        value = self._exchanged(value)

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
        """(batch, heads, own tokens, ...) -> (batch, own heads, tokens, ...), or the other way
        round with (batch, tokens, own heads, ...)."""
        parts = tensor.unflatten(1, (self._degree, -1)).movedim(1, 0).contiguous()
        received: torch.Tensor = all_to_all_single_autograd(parts, None, None, self._group)
        return received.movedim(0, 2).flatten(2, 3)

    def whole_loss(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        """The output with the loss of all tokens.

        Its gradient is this rank's, times the ranks: fsdp takes a mean.
        """
        name = type(model).__name__.removeprefix("FSDP")
        if self._calls != self._blocks:
            raise RefusedError(
                f"{self._calls} attentions ran in the {self._blocks} blocks of {name}, which mixes "
                "tokens in ways that cannot be split; use context_parallel 1."
            )

        own = output["loss"]
        total = own.detach().clone()
        dist.all_reduce(total, group=self._group)
        if not self._checked and not total:
            raise RefusedError(
                f"the loss of {name} does not take shifted labels; use context_parallel 1."
            )
        self._checked = True

        output["loss"] = total + self._degree * (own - own.detach())
        return output


def _check_padding(mask: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise an InputError where samples are padded elsewhere than at the end, or with labels."""
    padded = mask == 0
    is_inside = padded[:, :-1] & ~padded[:, 1:]
    if is_inside.any() or (labels[padded] != _IGNORED).any():
        raise InputError(
            "context_parallel takes samples that are padded at the end, with labels of -100 there.",
            "Set the tokenizer's padding_side to right.",
        )
