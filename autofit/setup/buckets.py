"""Buckets of gradients, as DistributedDataParallel keeps them: a stand-in in Python, for tensors without values.

DDP's own reducer is C++ and reads what it adds up.
"""

from collections.abc import Set
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from autofit.setup.state import Setup

_BUCKET_BYTES = 25 * 2**20  # DDP's default, but for the first bucket


def bucketed(setup: Setup, reached: Set[nn.Parameter]) -> None:
    """Copy every gradient of a last micro-batch into its bucket, of which it becomes a view, and add a full bucket up
    over all ranks. Buckets are filled from the last parameter to the first, and stay."""
    trained = [parameter for _, parameter in reversed(setup.trainable()) if parameter in reached]
    setup.exchange.sync_gradients = _Buckets(setup, trained).sync


class _Buckets:
    def __init__(self, setup: Setup, trained: list[nn.Parameter]) -> None:
        self._is_last = True
        self._missing: list[int] = []  # gradients of each bucket
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
        if setup.tracing.is_sampled:  # of blocks that stand for others, each weight has its own
            limits = [0]

        shapes = [torch.empty_like(parameter, device="meta") for parameter in trained]
        for number, indices in enumerate(
            dist._compute_bucket_assignment_by_size(shapes, limits)[0]
        ):
            parameters = [trained[index] for index in indices]
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=setup.device)
            self._missing.append(len(sizes))
            for parameter, view in zip(parameters, flat.split(sizes), strict=True):
                fill = partial(self._fill, number, len(sizes), flat, view.view_as(parameter))
                setup.on_close(parameter.register_post_accumulate_grad_hook(fill).remove)

    def sync(self, is_last: bool) -> None:
        self._is_last = is_last

    def _fill(
        self,
        number: int,
        count: int,
        flat: torch.Tensor,
        view: torch.Tensor,
        parameter: nn.Parameter,
    ) -> None:
        if not self._is_last:
            return
        assert parameter.grad is not None, "it was just added up"
        view.copy_(parameter.grad)
        parameter.grad = view

        self._missing[number] -= 1
        if not self._missing[number]:
            self._missing[number] = count
            dist.all_reduce(flat)
