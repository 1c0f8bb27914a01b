"""Buckets of gradients: a stand-in for DistributedDataParallel's in Python, for tensors without
values, whose own reducer is C++ and reads what it adds up; and those of a stage of a pipeline, where
DDP cannot tell which of several open backwards is the last one of a step.
"""

from collections.abc import Sequence, Set
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from autofit.setup.state import Setup

LARGEST_BUCKET = 25 * 2**20  # bytes: DDP's default, but for the first bucket


def buckets_of(weights: Sequence[torch.Tensor]) -> list[list[int]]:
    """DDP's buckets: the indices of weights, which come in the order in which they are filled."""
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, LARGEST_BUCKET]
    found: list[list[int]]
    found, _ = dist._compute_bucket_assignment_by_size(list(weights), limits)
    return found


def bucketed(setup: Setup, reached: Set[nn.Parameter]) -> None:
    """Copy every gradient of a last micro-batch into its bucket, of which it becomes a view, and
    add a full bucket up over all ranks.

    Buckets are filled from the last parameter to the first, and stay.

    Args:
        reached: the weights that the loss reaches; others have no gradients.
    """
    trained = [parameter for _, parameter in reversed(setup.trainable()) if parameter in reached]
    shapes = [torch.empty_like(parameter, device="meta") for parameter in trained]
    assignment = buckets_of(shapes)
    if setup.tracing.is_sampled:  # of blocks that stand for others, each weight has its own
        assignment = [[index] for index in range(len(trained))]

    buckets = [_Bucket(setup, [trained[index] for index in indices]) for indices in assignment]

    def sync(is_last: bool) -> None:
        for bucket in buckets:
            bucket.is_last = is_last

    setup.exchange.sync_gradients = sync


def averaged_at_end(setup: Setup, *, traced: bool = False) -> None:
    """Average gradients over the ranks that hold the same stage, when all backwards are over.

    What no rank has a gradient for stays without one.

    Args:
        traced: nobody can be asked for numbers: all ranks have the same gradients.
    """
    trained = [parameter for _, parameter in setup.trainable()]
    ranks = setup.ranks

    def average() -> None:
        has_one = [float(weight.grad is not None) for weight in trained]
        if not traced:
            flags = torch.tensor(has_one, device=setup.device)
            has_one = ranks.sum_of_stage(flags).tolist()
        reached = [weight for weight, count in zip(trained, has_one, strict=True) if count]
        for weight in reached:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

        assignment, _ = dist._compute_bucket_assignment_by_size(reached, [LARGEST_BUCKET])
        for numbers in assignment:
            gradients = [reached[number].grad for number in numbers]
            flat = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
            parts = ranks.sum_of_stage(flat).div_(ranks.layout.stage_world)
            sizes = [reached[number].numel() for number in numbers]
            for number, part in zip(numbers, parts.split(sizes), strict=True):
                weight = reached[number]
                assert weight.grad is not None, "all of them have one"
                weight.grad.copy_(part.view_as(weight))

    if trained:
        setup.exchange.after_backward.append(average)


class _Bucket:
    """The gradients of some weights, in one tensor.

    Attributes:
        is_last: whether the running micro-batch is the last one of a step.
    """

    def __init__(self, setup: Setup, parameters: list[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.is_last = True
        self._count = len(sizes)
        self._missing = self._count  # gradients, in this step
        self._flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=setup.device)

        for parameter, part in zip(parameters, self._flat.split(sizes), strict=True):
            fill = partial(self._fill, part.view_as(parameter))
            setup.on_close(parameter.register_post_accumulate_grad_hook(fill).remove)

    def _fill(self, view: torch.Tensor, parameter: nn.Parameter) -> None:
        """Copy a gradient into the bucket, and add that up once it is full."""
        if not self.is_last:
            return

        assert parameter.grad is not None, "it was just added up"
        view.copy_(parameter.grad)
        parameter.grad = view

        self._missing -= 1
        if not self._missing:
            self._missing = self._count
            dist.all_reduce(self._flat)
