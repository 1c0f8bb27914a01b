"""Kinds of parameters: what one call of PyTorch takes together.

It refuses plain tensors beside DTensors, and DTensors of several meshes: split layers beside whole
ones.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters, those together that are divided over the same dimensions of a mesh."""
    kinds: dict[tuple[str, ...] | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        # Not its data: a view fills the storage of a fake weight that rests on the host.
        tensor: torch.Tensor = parameter
        dimensions = None
        if isinstance(tensor, DTensor):
            dimensions = tensor.device_mesh.mesh_dim_names
        kinds.setdefault(dimensions, []).append(parameter)
    return list(kinds.values())


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    stages: int = 1,
    twice: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Clip the gradients of all parameters together; returns their norm before.

    Of divided ones each rank adds up its parts, and what several ranks hold in equal shares.

    Args:
        stages: of a pipeline, each of which holds other parameters.
        twice: the parameters that two stages hold.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained]
    is_divided = any(isinstance(gradient, DTensor) for gradient in gradients)
    if stages == 1 and not is_divided:
        return torch.nn.utils.clip_grad_norm_(trained, max_norm)

    tied = {id(parameter.grad) for parameter in twice}
    parts: dict[float, list[torch.Tensor]] = defaultdict(list)  # by the share of this rank
    for gradient in gradients:
        holders = 2 if id(gradient) in tied else 1
        pieces = 1
        if isinstance(gradient, DTensor):
            along = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            pieces = math.prod(size for size, placement in along if not placement.is_replicate())
            gradient = gradient.to_local()
        assert gradient is not None, "only those that have one"
        parts[pieces * stages / holders / dist.get_world_size()].append(gradient)

    # A stage may have no gradient, and so no format of its own.
    total = torch.zeros((), dtype=torch.float64, device=_device_of_sums(gradients))
    for share, own in parts.items():
        own_norm = torch.nn.utils.get_total_norm(own)
        total += own_norm.to(total) ** 2 * share
    dist.all_reduce(total)

    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for own in parts.values():
        torch._foreach_mul_(own, factor.to(own[0].device))
    return norm


def _device_of_sums(gradients: Iterable[torch.Tensor | None]) -> torch.device:
    """Where ranks add numbers up: their meshes' device, though gradients may rest on the host."""
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            return torch.device(gradient.device_mesh.device_type)
        if gradient is not None:
            return gradient.device
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
