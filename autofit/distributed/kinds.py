"""Kinds of parameters: what one call of PyTorch takes together. It refuses plain tensors beside DTensors, and DTensors
of several meshes: split layers beside whole ones."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters, those together that are divided over the same dimensions of a mesh."""
    kinds: dict[tuple[str, ...] | None, list[nn.Parameter]] = {}
    for each in parameters:
        tensor: torch.Tensor = (
            each  # not its data: a view fills the storage of a fake weight that rests on the host
        )
        kinds.setdefault(
            tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None, []
        ).append(each)
    return list(kinds.values())


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip the gradients of all parameters together; returns their norm before. Of divided ones each rank adds up its
    parts, and what several ranks hold in equal shares."""
    trained = [each for each in parameters if each.grad is not None]
    meshes = [each.grad.device_mesh for each in trained if isinstance(each.grad, DTensor)]
    if not meshes:
        return torch.nn.utils.clip_grad_norm_(trained, max_norm)
    parts: dict[float, list[torch.Tensor]] = defaultdict(list)  # by the share of this rank
    for gradient in (each.grad for each in trained):
        pieces = 1
        if isinstance(gradient, DTensor):
            along = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            pieces = math.prod(size for size, placement in along if not placement.is_replicate())
            gradient = gradient.to_local()
        assert gradient is not None, "only those that have one"
        parts[pieces / dist.get_world_size()].append(gradient)
    squares = [
        torch.nn.utils.get_total_norm(own).to(meshes[0].device_type) ** 2 * share
        for share, own in parts.items()
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    for own in parts.values():
        torch._foreach_mul_(own, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(own[0].device))
    return norm
