"""Sharding: a model's weights divided over ranks by FSDP2, or held by each rank under DDP; and undone again.

Both change classes of modules and install hooks that nothing in PyTorch takes back: what they changed is noted before,
so that a user's model can be returned as it came.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autofit.setup.layers import output_head, repeated_blocks
from autofit.setup.state import Setup

_REDUCED = {"bf16-mixed": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)}


def sharded(setup: Setup) -> None:
    """Divide the weights: each block is gathered when it is used. The root's group stays gathered from the forward to
    the end of the backward, so embedding and head, the largest weights outside of blocks, are groups of their own."""
    mesh = setup.ranks.mesh
    assert mesh is not None, "one device shards nothing"
    config, model = setup.config, setup.model
    _note_given(setup)
    _same_everywhere(model)
    pinned = setup.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": mesh if setup.ranks.layout.replicate > 1 else mesh["shard"],
        "reshard_after_forward": config["reshard_after_forward"],
        "mp_policy": _REDUCED.get(str(config["precision"]), MixedPrecisionPolicy()),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if config["fsdp_offload"] == "cpu" else OffloadPolicy(),
    }
    for group in (*repeated_blocks(model), *_large_ends(setup)):
        fully_shard(group, **options)
    fully_shard(model, **options | {"reshard_after_forward": False})
    setup.reshard = partial(_reshard, model)


def replicated(setup: Setup) -> None:
    """Average gradients over ranks that hold all weights, in the last micro-batch of a step only: they are whole
    anyway."""
    # DistributedDataParallel by hooks: its usual wrapper would hide the model's attributes from the user's loss.
    from torch.distributed._composable.replicate import replicate

    model: Any = setup.model
    _note_given(setup)
    _same_everywhere(model)
    replicate(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    setup.sync_gradients = model.set_requires_gradient_sync


def _large_ends(setup: Setup) -> Iterator[nn.Module]:
    """Embedding and head, where each is called as a layer and has a weight of its own."""
    get = getattr(setup.model, "get_input_embeddings", None)
    embedding, head = get() if get else None, output_head(setup.model)
    ends = [each for each in (embedding, head) if each is not None and hasattr(each, "weight")]
    if len(ends) == 2 and ends[0].weight is ends[1].weight:
        return
    if setup.config["loss"] != "standard":  # which multiplies by the head's weight itself
        ends = [each for each in ends if each is not head]
    yield from ends


def _same_everywhere(model: nn.Module) -> None:
    """Give all ranks the weights of the first: a model made in each process may have been drawn differently."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)


def _reshard(model: nn.Module) -> None:
    """Give up gathered weights, which a forward without a backward leaves behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _note_given(setup: Setup) -> None:
    """Have `close` put the weights together again, in the parameters that the model came with, and take away what
    PyTorch added to its modules."""
    model = setup.model
    setup.on_close(partial(_take_away, [_Given(module) for module in model.modules()]))
    setup.on_close(partial(_put_together, [(each, dict(each._parameters)) for each in model.modules()]))


class _Given:
    """A module's class, attributes and hooks, as they were."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind, self.attributes = module, module.__class__, set(vars(module))
        self.hooks = [set(hooks) for hooks in _hooks_of(module)]


def _take_away(given: list[_Given]) -> None:
    for each in given:
        each.module.__class__ = each.kind
        for hooks, known in zip(_hooks_of(each.module), each.hooks, strict=True):
            for key in hooks.keys() - known:
                del hooks[key]
        for name in vars(each.module).keys() - each.attributes:
            delattr(each.module, name)


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    yield from (module._forward_pre_hooks, module._forward_hooks)
    yield from (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs)


def _put_together(given: list[tuple[nn.Module, dict[str, nn.Parameter | None]]]) -> None:
    whole: dict[nn.Parameter, torch.Tensor] = {}
    for module, _ in given:
        if isinstance(module, FSDPModule):
            module.reshard()
    for module, parameters in given:
        for name, parameter in parameters.items():
            held = module._parameters[name]
            if parameter is not None and parameter not in whole and isinstance(held, DTensor):
                whole[parameter] = parameter.data = held.full_tensor().detach()
                parameter.grad = None
            module._parameters[name] = parameter
