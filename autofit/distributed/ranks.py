"""Ranks: this process among those that train one model together, and the numbers that all of them
agree on.

Everything that decides how a step goes on (how many micro-batches, what a label weighs, whether a
loss is finite) is decided on what all ranks know: otherwise one of them waits for ever in a
collective that another never enters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)

from autofit.core.errors import InputError, RankError
from autofit.core.layout import Layout


@dataclass(frozen=True)
class Ranks:
    """One process of a Layout; a training on one device has one.

    Attributes:
        mesh: of (replicate, shard), before them pipeline and after them tensor where there is more
            than one; context groups hold shards, too. None on one device.
        context: the ranks that see other tokens of the same samples.
        stage: the ranks that hold the same stage of a pipeline; None: all.
    """

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    mesh: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Self:
        """This process.

        Raises InputError where there are not as many processes as the layout has devices.
        """
        if layout.world == 1:
            return cls(layout)

        running = dist.get_world_size() if dist.is_initialized() else 1
        if running != layout.world:
            processes = "process is" if running == 1 else "processes are"
            raise InputError(
                f"this config trains on {layout.world} devices, and {running} {processes} running.",
                f"Start one for each device: torchrun --nproc-per-node {layout.world}.",
            )

        sizes = {}
        if layout.pipeline > 1:
            sizes["pipeline"] = layout.pipeline
        sizes |= {"replicate": layout.replicate, "shard": layout.shard * layout.context}
        if layout.tensor > 1:
            sizes["tensor"] = layout.tensor
        if dist.get_backend() != "fake":
            # A prediction in this process, or in the one it was forked from, left layouts that
            # name its own mesh, on which every process is the first rank.
            _clear_python_sharding_prop_cache()
            _clear_fast_path_sharding_prop_cache()
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return cls(
            layout,
            dist.get_rank(),
            mesh,
            _context_group(layout),
            _stage_group(layout),
        )

    @property
    def dp_rank(self) -> int:
        """Which part of each effective batch is this rank's."""
        layout = self.layout
        return self.rank % layout.stage_world // (layout.context * layout.tensor)

    @property
    def stage_index(self) -> int:
        """Which stage of a pipeline this rank holds, from 0."""
        return self.rank // self.layout.stage_world

    @property
    def are_several(self) -> bool:
        """Whether there are others."""
        return self.layout.world > 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and reports for all."""
        return not self.rank

    def sums(self, *numbers: float) -> tuple[float, ...]:
        """Each number added up over the ranks that see other samples; those that see the same
        samples give the same."""
        alike = self.layout.same_samples
        return tuple(sum(of_ranks) / alike for of_ranks in self.everywhere(*numbers))

    def largest(self, *numbers: float) -> tuple[float, ...]:
        """The largest of each number over all ranks."""
        return tuple(map(max, self.everywhere(*numbers)))

    def sum_of(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor added up over all ranks, in place."""
        if self.are_several:
            dist.all_reduce(value)
        return value

    def sum_of_stage(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor added up over the ranks that hold the same stage, in place."""
        if self.layout.stage_world > 1:
            dist.all_reduce(value, group=self.stage)
        return value

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the values of its stage's first rank, in place: each process may have drawn
        others."""
        if self.layout.stage_world > 1 and tensor.numel():
            with torch.no_grad():
                values = tensor.contiguous()
                # As bytes: backends do not know every dtype.
                first = self.stage_index * self.layout.stage_world
                dist.broadcast(values.view(-1).view(torch.uint8), first, group=self.stage)
                tensor.copy_(values)
        return tensor

    def joined(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """The entries of all ranks."""
        if not self.are_several:
            return own

        of_ranks: list[Any] = [None] * self.layout.world
        dist.all_gather_object(of_ranks, own)
        entries: dict[Any, Any] = {}
        for of_rank in of_ranks:
            entries |= of_rank
        return entries

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Wait for all at the end, and fail on all where one fails inside: with its own error
        there, a RankError on the others.

        Args:
            what: fails, for messages.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error

        anywhere = self.largest(float(failed is not None))[0]
        if failed is not None:
            raise failed
        if anywhere:
            raise RankError(f"{what} failed on another rank.")

    def everywhere(self, *numbers: float) -> list[tuple[float, ...]]:
        """What each number is on every rank, by one exchange."""
        return self.asked(*numbers)()

    def asked(self, *numbers: float) -> Callable[[], list[tuple[float, ...]]]:
        """The same by an exchange that goes on until the answer is called for."""
        if not self.are_several:
            return lambda: [(number,) for number in numbers]

        device = "cpu" if self.mesh is None else self.mesh.device_type
        own = torch.tensor(numbers, dtype=torch.float64, device=device)
        of_ranks = [torch.empty_like(own) for _ in range(self.layout.world)]
        exchange = dist.all_gather(of_ranks, own, async_op=True)

        def answer() -> list[tuple[float, ...]]:
            exchange.wait()
            return list(zip(*torch.stack(of_ranks).tolist(), strict=True))

        return answer


def _stage_group(layout: Layout) -> dist.ProcessGroup | None:
    """This rank's group, which all ranks must make together with all others."""
    if layout.pipeline == 1:
        return None

    size = layout.stage_world
    groups = [[*range(first, first + size)] for first in range(0, layout.world, size)]
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own


def group_of_ends(layout: Layout) -> dist.ProcessGroup | None:
    """The first and the last stage of the same samples, made by all ranks together.

    None for a rank that holds neither.
    """
    size = layout.stage_world
    own, _ = dist.new_subgroups_by_enumeration(
        [[rank, layout.world - size + rank] for rank in range(size)]
    )
    return own


def _context_group(layout: Layout) -> dist.ProcessGroup | None:
    """This rank's group, which all ranks must make together with all others."""
    if layout.context == 1:
        return None

    same_samples = layout.context * layout.tensor
    groups = []
    for first in range(0, layout.world, same_samples):
        starts = range(first, first + layout.tensor)
        groups += [[*range(start, start + same_samples, layout.tensor)] for start in starts]
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own
