"""Layers split over the devices of a tensor group, by the plan that comes with a transformers model.

A plan names, layer by layer, along which side a linear layer is split; PyTorch's ParallelStyles do it. What a plan does
not name stays whole, and is the same on all devices of a group: so are its inputs and gradients.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from autofit.core.errors import RefusedError
from autofit.setup.layers import is_plain_linear, output_head
from autofit.setup.state import Setup

Styles = dict[nn.Module, str]  # of transformers, by layer

_ALIKE = 0.05  # by how much norms of gradients may differ, of each
_NOISE = 1e-3  # the same, of the largest
WHOLE = "use tensor_parallel 1"
_SUMMED = (
    "replicated_with_grad_allreduce"  # norms of single heads, of which each device sees its own
)
_EXPERTS = "moe_tp_experts"  # left whole, for fsdp to divide
_HEAD = "colwise_gather_output"
_VOCABULARY = "embedding_rowwise"
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    _HEAD: lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    **dict.fromkeys(
        ("rowwise_split_input", _VOCABULARY), lambda: RowwiseParallel(input_layouts=Replicate())
    ),
}


def styles_of(setup: Setup) -> Styles:
    """How each layer is split: as the plan names it. Raises RefusedError where there is no plan, or none that can be
    followed in so many parts."""
    model = setup.model
    degree = setup.ranks.layout.tensor
    name = type(setup.model).__name__
    styles: Styles = {}
    for module, style in planned(model):
        is_known = style in _STYLES and isinstance(module, nn.Linear) and is_plain_linear(module)
        if style != _SUMMED and not is_known:
            raise RefusedError(
                f"the plan of {name} asks for {style} of a {type(module).__name__}; {WHOLE}."
            )
        if isinstance(module, nn.Linear):
            side = module.in_features if style.startswith("rowwise") else module.out_features
            if side % degree:
                raise RefusedError(
                    f"a layer of {side} features cannot be split in {degree}; choose a divisor."
                )
        styles[module] = style
    if not styles:
        raise RefusedError(f"transformers has no plan to split the layers of {name}; {WHOLE}.")
    if _drops(model):
        raise RefusedError(
            f"each device of a group would drop something else; set dropout to 0, or {WHOLE}."
        )
    check_heads(model, degree)
    return styles | _styles_of_ends(setup)


def planned(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """What a plan names among the blocks' modules, each with its style."""
    plan = getattr(model, "_tp_plan", None) or {}
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\d+", "*", path))
        if (
            style not in (None, _EXPERTS)
            and not isinstance(module, nn.Embedding)
            and module is not output_head(model)
        ):
            yield module, style


def split_layers(setup: Setup, parts: list[nn.Module], styles: Styles) -> None:
    """Split those layers among the parts of a model that have a style; their weights are there."""
    weights: dict[nn.Parameter, nn.Parameter] = {}
    for module in (each for each in parts if each in styles):
        assert setup.ranks.mesh is not None, "one device splits nothing"
        style = styles[module]
        mesh = setup.ranks.mesh["tensor"]
        if style == _SUMMED:
            _sum_gradients(module, mesh.get_group())
            continue
        given: Any = module._parameters["weight"]
        parallelize_module(module, mesh, _STYLES[style]())
        made: Any = module._parameters["weight"]
        module._parameters["weight"] = weights.setdefault(given, made)  # tied weights stay tied
        # FSDP2 puts a hook on what they return, which would be lost on a view
        if style in (_HEAD, _VOCABULARY):
            module.register_forward_hook(lambda module, inputs, output: output.clone())


def check_alike(setup: Setup, norms: dict[nn.Parameter, torch.Tensor]) -> None:
    """Compare gradients of whole weights between the devices of each group once, after a backward, by their `norms` or
    those of what is left of them: a plan that leaves out weights among split layers would train them with parts of
    their gradients. Raises RefusedError."""
    actions = setup.exchange.after_backward
    setup.exchange.after_backward = [
        each for each in actions if getattr(each, "func", None) is not check_alike
    ]
    assert setup.ranks.mesh is not None, "one device splits nothing"
    whole = []
    group = setup.ranks.mesh["tensor"].get_group()
    for name, weight in setup.trainable():
        mesh = weight.data.device_mesh if isinstance(weight.data, DTensor) else None
        if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
            whole.append((name, norms.get(weight, norm_of(weight)).to(setup.device)))
    if not whole:
        return
    least, most = (torch.stack([norm for _, norm in whole]) for _ in range(2))
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    differ = setup.ranks.largest(*((most - least) / (_ALIKE * most + _NOISE * most.max())).tolist())
    if names := [name for (name, _), each in zip(whole, differ, strict=True) if each > 1]:
        message = f"gradients of {names[0]} differ between devices, which the plan of transformers does not say"
        raise RefusedError(f"tensor_parallel: {message}; {WHOLE}.")


def norm_of(weight: nn.Parameter) -> torch.Tensor:
    """The norm of a weight's gradient, or of the weight where it has none; of a divided one of this rank's part."""
    seen = weight.data if weight.grad is None else weight.grad
    local = seen.to_local() if isinstance(seen, DTensor) else seen
    norm: torch.Tensor = local.detach().float().norm()
    return norm


def _styles_of_ends(setup: Setup) -> Styles:
    """Those of the embedding and the head, where they can be split. A loss that multiplies by the head's weight itself
    wants it whole."""
    model: Any = setup.model
    degree = setup.ranks.layout.tensor
    head = output_head(model)
    embedding = model.get_input_embeddings()
    plain = type(embedding) is nn.Embedding  # others scale what they look up
    weights = [
        end.weight for end in (head, embedding) if end is not None and hasattr(end, "weight")
    ]
    holders = [
        each
        for each in model.modules()
        if any(each._parameters.get("weight") is weight for weight in weights)
    ]
    if {*holders} - {head, embedding}:  # encoder and decoder share one
        return {}
    divides = (
        isinstance(head, nn.Linear)
        and head.out_features % degree == 0
        and _HEAD in model._tp_plan.values()
    )
    splits_head = divides and setup.config.loss == "standard"
    if head is not None and head.weight is embedding.weight:
        # not to be found in a part of a vocabulary
        together = splits_head and plain and embedding.padding_idx is None
        return {head: _HEAD, embedding: _VOCABULARY} if together else {}
    ends = {head: splits_head, embedding: plain and embedding.embedding_dim % degree == 0}
    return {end: _HEAD for end, splits in ends.items() if splits}


def _drops(model: Any) -> bool:
    """Whether anything is dropped but of attention, where each device has heads of its own."""
    named = [
        value
        for name, value in model.config.to_dict().items()
        if "drop" in name and "att" not in name
    ]
    return any(isinstance(each, nn.Dropout) and each.p for each in model.modules()) or any(
        isinstance(value, float) and value for value in named
    )


def heads_of(model: nn.Module) -> list[int]:
    """The numbers of heads, and of key and value heads, of all attention in a transformers model."""
    configs = {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None))
    }
    given = [
        getattr(c, n, None)
        for c in configs.values()
        for n in ("num_attention_heads", "num_key_value_heads")
    ]
    counts = {
        count for each in given for count in (each if isinstance(each, list | tuple) else [each])
    }
    return sorted(count for count in counts if isinstance(count, int) and count)


def check_heads(model: nn.Module, degree: int) -> None:
    """Raise a RefusedError where there are numbers of heads that cannot be divided."""
    heads = heads_of(model)
    if any(count % degree for count in heads):
        message = f"{' and '.join(map(str, heads))} heads cannot be divided among {degree} devices"
        raise RefusedError(f"{message}; choose a divisor of them.")


class _Summed(torch.autograd.Function):
    """A tensor whose gradients are added up over a group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Put its weights' stand-ins in place during each forward, so that their gradients are whole before anything else
    sees them."""
    held: dict[str, nn.Parameter | None] = {}

    def before(*_: Any) -> None:
        held.update(module._parameters)
        for name, weight in held.items():
            if weight is not None:
                module._parameters[name] = _Summed.apply(weight, group)  # type: ignore[no-untyped-call]

    def after(*_: Any) -> None:
        module._parameters.update(held)
        held.clear()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
