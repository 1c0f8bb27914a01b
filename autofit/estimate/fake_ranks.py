"""Fake ranks: one process traces the step of a rank among any number of them.

PyTorch's fake process group answers every collective at once, whatever the size of the group. What
a rank learns from others by numbers (how many micro-batches they have, what their labels weigh) is
taken to be what it has itself.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autofit.core.errors import UntraceableError
from autofit.core.layout import Layout
from autofit.distributed import Ranks
from autofit.estimate.recorder import Collective, Recorder

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
# By operator, which of its arguments holds weights that are whole for a while, or gradients before
# they are divided.
_HOLDING = {
    "c10d::_allgather_base_": (0, "gathered"),
    "fsdp::split_with_sizes_copy": (-1, "gathered"),
    "fsdp::chunk_cat": (-1, "reduced"),
}
# By operator, the stream of its own in which FSDP2 makes its first argument (_fsdp_collectives.py:
# foreach_all_gather, foreach_reduce): casts of this rank's shards and what is gathered of all; what
# a reduction leaves, the gradients.
_STREAMS = {
    "fsdp::all_gather_copy_in": "gather",
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "reduce",
}
_KINDS = {  # by what is in an operator's name
    **dict.fromkeys(("allgather", "all_gather"), "all_gather"),
    **dict.fromkeys(("allreduce", "all_reduce"), "all_reduce"),
    **dict.fromkeys(("alltoall", "all_to_all"), "all_to_all"),
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
}


Sizes = tuple[int, ...]


class _FakeRanks(Ranks):
    """The first rank, whose numbers are everybody's."""

    def asked(self, *numbers: float) -> Callable[[], list[tuple[float, ...]]]:
        tensors: list[torch.Tensor] = []
        if self.are_several:  # the exchange itself takes part in a step
            own = torch.tensor(numbers, dtype=torch.float64)
            tensors = [
                own,
                *(torch.empty_like(own) for _ in range(self.layout.world)),
            ]
            dist.all_gather(tensors[1:], own)

        def answer() -> list[tuple[float, ...]]:
            tensors.clear()
            return [(number,) * self.layout.world for number in numbers]

        return answer

    def joined(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """What this rank has: nobody is there to send more."""
        return own


class _AskedRanks(_FakeRanks):
    """The same after the first micro-batch of a step, in which all was exchanged."""

    def asked(self, *numbers: float) -> Callable[[], list[tuple[float, ...]]]:
        return lambda: [(number,) * self.layout.world for number in numbers]


def asked_before(ranks: Ranks) -> Ranks:
    """The ranks in a later micro-batch of a step."""
    return _AskedRanks(**vars(ranks))


@contextmanager
def fake_ranks(layout: Layout, recorder: Recorder, stage: int = 0) -> Iterator[Ranks]:
    """The first of the ranks of a layout that hold a stage.

    To be entered outside of a fake-tensor mode, which cannot make a mesh.

    Raises:
        UntraceableError: this process is a rank of a real group.
    """
    if layout.world == 1:
        yield Ranks(layout)
        return

    if dist.is_initialized():
        raise UntraceableError("a rank of a training cannot predict a step of other ranks.")

    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(propagator: Any, schema: Any) -> Any:
        """The shape of a result, for which DTensor computes with whole tensors that a step does not
        have."""
        with mock.patch.object(recorder, "ignoring", True):
            return propagate(propagator, schema)

    def exchanged(func: Any, args: tuple[Any, ...], result: Any) -> Collective | None:
        """Also tells what holds whole weights and gradients for it, and in which streams."""
        if stream := _STREAMS.get(func._schema.name):
            made = (
                storage
                for storage in recorder.storages_of(args[0])
                if recorder.labels.get(storage) != "parameters"
            )
            recorder.streams.update(dict.fromkeys(made, stream))

        if (found := _HOLDING.get(func._schema.name)) is not None:
            position, label = found
            recorder.label(args[position], label)

        if func._schema.name == "fsdp::all_gather_copy_in":
            recorder.joined.update(_joined(recorder, args[0], args[1]))

        collective = collective_of(func, args, result)
        if collective is None or collective.kind != "all_gather":
            return collective

        parts = (recorder.joined.get(storage) for storage in recorder.storages_of(args[0]))

        return replace(collective, parts=next(filter(None, parts), ()))

    def on_device(param: Any) -> list[torch.Tensor]:
        """What a rank gives to a gathering; what it holds on the host, it copies first."""
        if not param.offload_to_cpu:
            return shards_of(param)  # type: ignore[no-any-return]

        copy = recorder.to_device(param._sharded_param_data)
        recorder.label(copy, "gathered")
        recorder.streams.update(dict.fromkeys(recorder.storages_of(copy), "gather"))
        with mock.patch.object(param, "_sharded_param_data", copy):
            return shards_of(param)  # type: ignore[no-any-return]

    shards_of = _fsdp_param.FSDPParam.all_gather_inputs.fget
    recorder.exchanged = exchanged
    hook = sys.excepthook
    first = stage * layout.stage_world

    # DTensor's answers name groups, and those of ranks before may be gone: what is left of a traced
    # model is asked once more when it is given back.
    _clear_sharding_prop_cache()
    dist.init_process_group(
        "fake",
        store=FakeStore(),
        rank=first,
        world_size=layout.world,
    )

    try:
        with (
            mock.patch.object(_PipelineSchedule, "_warmup_p2p", _agreed),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", aside),
            mock.patch.object(_fsdp_param, "_chunk_with_empty", _first_chunk),
            mock.patch.object(_fsdp_param.FSDPParam, "all_gather_inputs", property(on_device)),
        ):
            yield _FakeRanks.of(layout, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        sys.excepthook = hook  # each group wraps it, to tell the rank


def _agreed(_: Any, stages: Sequence[Any], *__: Any) -> None:
    """Stages of a pipeline have voted, by numbers, that they know the sizes of what they
    exchange."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _joined(
    recorder: Recorder,
    shards: list[torch.Tensor],
    whole: torch.Tensor,
) -> Iterator[tuple[int, Sizes]]:
    """By storage, the bytes of each weight in what FSDP2 gathers, and in the casts of this rank's
    shards of them."""
    of_shards: dict[int, Sizes] = {}
    for shard in shards:
        for storage in recorder.storages_of(shard):
            of_shards[storage] = (*of_shards.get(storage, ()), shard.nbytes)

    yield from ((storage, sizes) for storage, sizes in of_shards.items() if len(sizes) > 1)
    ranks = whole.nbytes // sum(shard.nbytes for shard in shards)
    for storage in recorder.storages_of(whole):
        yield storage, tuple(ranks * shard.nbytes for shard in shards)


def _first_chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """What FSDP2 takes of a weight for the first rank; it would make those of a thousand ranks."""
    return [
        tensor.narrow(
            dim,
            0,
            -(-tensor.shape[dim] // count),
        )
    ]


def collective_of(func: Any, args: tuple[Any, ...], result: Any) -> Collective | None:
    """What an operator exchanges, by PyTorch's own table; None for any other."""
    if func.namespace not in _NAMESPACES:
        return None

    from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

    if func not in collective_ops or func in sync_ops:
        return None

    group = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
    name = func._schema.name.partition("::")[2]
    kind = next((kind for word, kind in _KINDS.items() if word in name), name)
    nbytes = CollectiveOp.get_comm_tensor_size(func, result, args, {})
    if kind == "all_to_all":  # which counts what is given and what is got
        nbytes //= 2

    stride = group[1] - group[0] if len(group) > 1 else 1

    return Collective(
        kind,
        nbytes,
        len(group),
        func.namespace != "c10d",
        stride,
    )
