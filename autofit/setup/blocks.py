"""Repeated blocks: the layers of a network, which checkpointing, streaming and regional compilation work on."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks, in order: the children of the list or sequence that holds most of the weights.

    A list counts when at least two children are of one class. Encoder-decoder models have several such lists; all
    children of lists of that kind are returned, but never a block inside another.
    """
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # outer modules come before inner ones
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [child for child in module if any(True for _ in child.parameters())]
        kinds = [type(child) for child in children]
        if len(children) < 2 or max(kinds.count(kind) for kind in kinds) < 2 or not _composite(children):
            continue
        blocks.extend(dict.fromkeys(children))  # a block whose weights are shared stands there several times
        inside.update(inner for child in children for inner in child.modules())
    return blocks


def block_groups(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks, grouped by identical structure (class and parameter shapes)."""
    groups: dict[tuple[object, ...], list[nn.Module]] = {}
    for block in repeated_blocks(model):
        signature = (type(block), *((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters()))
        groups.setdefault(signature, []).append(block)
    return list(groups.values())


def _composite(children: list[nn.Module]) -> bool:
    """Whether the children do more than one operation each: a Sequential of bare Linears is no list of blocks."""
    return any(len(list(child.children())) > 0 for child in children)
