"""Repeated blocks: the layers of a network, which checkpointing, streaming and regional compilation work on."""

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks in order: the children of every ModuleList or Sequential that repeats a class of layers. A
    list counts when at least two children share a class and at least one child has children of its own (a Sequential of
    bare Linears is no list of blocks). Encoder-decoder models have several lists; a block never contains another."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # outer modules come before inner ones
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [child for child in module if any(True for _ in child.parameters())]
        kinds = [type(child) for child in children]
        repeats = len(children) >= 2 and max(kinds.count(kind) for kind in kinds) >= 2
        if repeats and any(True for child in children for _ in child.children()):
            blocks.extend(dict.fromkeys(children))  # a block with shared weights appears several times
            inside.update(inner for child in children for inner in child.modules())
    return blocks
