"""Parameters of one device stay together; divided ones are in training/test_tensor_and_context_ranks.py."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from autofit.distributed.kinds import by_kind, clip
from tests.ranks import on_ranks


def test_plain_parameters_are_of_one_kind_and_clipped_as_by_pytorch() -> None:
    parameters = [nn.Parameter(torch.full((3,), 2.0)) for _ in range(2)]
    assert by_kind(parameters) == [parameters]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 4.0)
    assert torch.allclose(
        clip([*parameters, nn.Parameter(torch.ones(1))], 1.0), torch.tensor(96.0).sqrt()
    )
    assert torch.allclose(
        torch.stack([p.grad for p in parameters if p.grad is not None]).norm(), torch.tensor(1.0)
    )


def clipped() -> tuple[int, float, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    divided = [
        nn.Parameter(distribute_tensor(torch.ones(5, 4), each, placements))
        for each, placements in (
            (mesh, [Shard(0), Shard(1)]),
            (mesh["shard"], [Shard(0)]),
            (mesh, [Replicate()] * 2),
        )
    ]
    parameters = [*divided, nn.Parameter(torch.ones(5, 4))]
    for parameter in parameters:
        parameter.grad = parameter.detach() * 3.0
    norm = float(clip(parameters, 2.0))
    gradients = [each.grad for each in parameters]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    return len(by_kind(parameters)), norm, [float(each.norm()) for each in whole]


def test_what_ranks_divide_counts_once() -> None:
    expected = (4 * 20 * 9.0) ** 0.5
    for kinds, norm, parts in on_ranks(4, clipped):
        assert kinds == 3
        assert abs(norm - expected) < 1e-5
        assert all(abs(part - 1.0) < 1e-5 for part in parts)
