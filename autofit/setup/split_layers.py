"""Layers split over the devices of a tensor group, by the plan that comes with a transformers
model.

A plan names, layer by layer, along which side a linear layer is split; PyTorch's ParallelStyles do
it. What a plan does not name stays whole, and is the same on all devices of a group: so are its
inputs and gradients.
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

# Norms of single heads, of which each device sees its own.
_SUMMED = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"  # left whole, for fsdp to divide
_HEAD = "colwise_gather_output"
_VOCABULARY = "embedding_rowwise"
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    _HEAD: lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    _VOCABULARY: lambda: RowwiseParallel(input_layouts=Replicate()),
}


def styles_of(setup: Setup) -> Styles:
    """How each layer is split: as the plan names it.

    Raises:
        RefusedError: where there is no plan, or none that can be followed in so many parts.
    """
    model = setup.model
    degree = setup.ranks.layout.tensor
    name = type(setup.model).__name__
    styles: Styles = {}
    for module, style in planned(model):
        is_known = style in _STYLES and isinstance(module, nn.Linear) and is_plain_linear(module)
        if style != _SUMMED and not is_known:
            kind = type(module).__name__
            raise RefusedError(
                f"the plan of {name} asks for {style} of a {kind}; use tensor_parallel 1."
            )

        if isinstance(module, nn.Linear):
            side = module.in_features if style.startswith("rowwise") else module.out_features
            if side % degree:
                raise RefusedError(
                    f"a layer of {side} features cannot be split in {degree}; choose a divisor."
                )
        styles[module] = style

    if not styles:
        raise RefusedError(
            f"transformers has no plan to split the layers of {name}; use tensor_parallel 1."
        )

    if _drops(model):
        raise RefusedError(
            "each device of a group would drop something else; set dropout to 0, or use "
            "tensor_parallel 1."
        )

    check_heads(model, degree)
    return styles | _styles_of_ends(setup)


def planned(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """What a plan names among the blocks' modules, each with its style."""
    plan = getattr(model, "_tp_plan", None) or {}
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\d+", "*", path))
        if style is None or style == _EXPERTS:
            continue

        is_end = isinstance(module, nn.Embedding) or module is output_head(model)
        if not is_end:
            yield module, style


def split_layers(setup: Setup, parts: list[nn.Module], styles: Styles) -> None:
    """Split those layers among some modules that have a style; their weights are there by now."""
    weights: dict[nn.Parameter, nn.Parameter] = {}
    for module in parts:
        if module not in styles:
            continue

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
    """Compare gradients of whole weights between the devices of each group once, after a backward.

    A plan that leaves out weights among split layers would train them with parts of their
    gradients.

    Args:
        norms: of gradients that the backward has freed; of others the norm is taken here.

    Raises:
        RefusedError: where they differ.
    """
    actions = setup.exchange.after_backward
    setup.exchange.after_backward = [
        action for action in actions if getattr(action, "func", None) is not check_alike
    ]

    assert setup.ranks.mesh is not None, "one device splits nothing"
    group = setup.ranks.mesh["tensor"].get_group()

    names = []
    own = []
    for name, weight in setup.trainable():
        if isinstance(weight.data, DTensor):
            dimensions = weight.data.device_mesh.mesh_dim_names
            if "tensor" in (dimensions or ()):
                continue
        names.append(name)
        own.append(norms.get(weight, norm_of(weight)).to(setup.device))
    if not names:
        return

    least = torch.stack(own)
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    tolerance = _ALIKE * most + _NOISE * most.max()

    differ = setup.ranks.largest(*((most - least) / tolerance).tolist())
    for name, difference in zip(names, differ, strict=True):
        if difference > 1:
            raise RefusedError(
                f"tensor_parallel: gradients of {name} differ between devices, which the plan of "
                "transformers does not say; use tensor_parallel 1."
            )


def norm_of(weight: nn.Parameter) -> torch.Tensor:
    """The norm of a weight's gradient, or of the weight where it has none.

    Of a divided one, that of this rank's part.
    """
    seen = weight.data if weight.grad is None else weight.grad
    if isinstance(seen, DTensor):
        seen = seen.to_local()
    norm: torch.Tensor = seen.detach().float().norm()
    return norm


def _styles_of_ends(setup: Setup) -> Styles:
    """The styles of the embedding and the head, where they can be split.

    A loss that multiplies by the head's weight itself wants it whole.
    """
    model: Any = setup.model
    degree = setup.ranks.layout.tensor
    head = output_head(model)
    embedding = model.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding  # others scale what they look up
    if _shares_weights(model, head, embedding):
        return {}

    splits_head = (
        isinstance(head, nn.Linear)
        and head.out_features % degree == 0
        and _HEAD in model._tp_plan.values()
        and setup.config.loss == "standard"
    )

    if head is not None and head.weight is embedding.weight:
        # not to be found in a part of a vocabulary
        if splits_head and is_plain and embedding.padding_idx is None:
            return {head: _HEAD, embedding: _VOCABULARY}
        return {}

    styles: Styles = {}
    if head is not None and splits_head:
        styles[head] = _HEAD
    if is_plain and embedding.embedding_dim % degree == 0:
        styles[embedding] = _HEAD
    return styles


def _shares_weights(model: nn.Module, head: Any, embedding: Any) -> bool:
    """Whether another module has a weight of the ends, too, as where encoder and decoder share an
    embedding."""
    weights = [end.weight for end in (head, embedding) if hasattr(end, "weight")]
    for module in model.modules():
        if module is head or module is embedding:
            continue
        held = module._parameters.get("weight")
        if any(held is weight for weight in weights):
            return True
    return False


def _drops(model: Any) -> bool:
    """Whether anything is dropped but of attention, where each device has heads of its own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            return True

    for name, value in model.config.to_dict().items():
        if "drop" in name and "att" not in name and isinstance(value, float) and value:
            return True
    return False


def heads_of(model: nn.Module) -> list[int]:
    """The numbers of heads, and of key and value heads, of all attention in a transformers
    model."""
    counts: set[int] = set()
    configs = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    for config in configs.values():
        for name in ("num_attention_heads", "num_key_value_heads"):
            given = _of_layers(config, name)
            counts.update(count for count in given if isinstance(count, int) and count)
    return sorted(counts)


def _of_layers(config: Any, name: str) -> list[Any]:
    """The values of a key of a config: one, or that of each layer."""
    try:
        given = getattr(config, name, None)
    except RuntimeError:  # transformers refuses one where layers differ, as Gemma 4's
        layers = config.per_layer_config
        return [getattr(layers[number], name) for number in range(len(layers))]
    return list(given) if isinstance(given, list | tuple) else [given]


def check_heads(model: nn.Module, degree: int) -> None:
    """Raise a RefusedError where there are numbers of heads that cannot be divided."""
    heads = heads_of(model)
    if any(count % degree for count in heads):
        counts = " and ".join(map(str, heads))
        raise RefusedError(
            f"{counts} heads cannot be divided among {degree} devices; choose a divisor of them."
        )


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
    """Put its weights' stand-ins in place during each forward, so that their gradients are whole
    before anything else sees them."""
    held: dict[str, nn.Parameter | None] = {}

    def before(*_: Any) -> None:
        """Note the weights, and put stand-ins in their place."""
        held.update(module._parameters)
        for name, weight in held.items():
            if weight is not None:
                module._parameters[name] = _Summed.apply(weight, group)  # type: ignore[no-untyped-call]

    def after(*_: Any) -> None:
        """Put the weights back, also where the forward failed."""
        module._parameters.update(held)
        held.clear()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
