"""The first rank without the others: one device measures what each of many holds and computes.

PyTorch's fake process group sends nothing, and not every version of it writes what was to come.
Here each collective leaves what the others would have sent if they had this rank's numbers, so that
steps go on with finite ones; and what is gathered is written at once, not part by part, of which
there may be a thousand.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from autofit.core.place import Place
from autofit.distributed.group import take_place


@contextmanager
def first_of(devices: int, nodes: int, device: str) -> Iterator[None]:
    """Be the first of the ranks on so many devices of each node inside."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = devices * nodes
    hook = sys.excepthook
    take_place(Place(0, world, 0, devices), device)

    kernels = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # It warns that these override others.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in _KERNELS.items():
            kernels.impl(name, kernel, device.upper(), allow_override=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        kernels._destroy()
        sys.excepthook = hook  # the group wraps it, to tell the rank


def _gather(output: torch.Tensor, own: torch.Tensor, *_: Any) -> tuple[torch.Tensor, Any]:
    parts = output.view(-1, own.numel())
    parts[1:] = own.view(1, -1)
    if output.data_ptr() != own.data_ptr():  # FSDP2 has it in its place already
        parts[0] = own.view(-1)
    return output, _done([output])


def _reduce_scatter(output: torch.Tensor, own: torch.Tensor, *_: Any) -> tuple[torch.Tensor, Any]:
    output.view(-1).copy_(own.view(-1)[: output.numel()])
    return output, _done([output])


def _scatter(
    outputs: list[torch.Tensor], parts: list[list[torch.Tensor]], *_: Any
) -> tuple[list[torch.Tensor], Any]:
    outputs[0].copy_(parts[0][0])
    return outputs, _done(outputs)


def _reduce(tensors: list[torch.Tensor], *_: Any) -> tuple[list[torch.Tensor], Any]:
    return tensors, _done(tensors)


def _exchange(output: torch.Tensor, own: torch.Tensor, *_: Any) -> Any:
    output.copy_(own)
    return _done([output])


def _done(result: list[torch.Tensor]) -> Any:
    """A collective that has ended, of whose result DistributedDataParallel asks."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    devices: list[Any] = []
    if result and result[0].device.type == "cuda":
        devices = [result[0].device]
    future = torch.futures.Future[Any](devices=devices)
    future.set_result(result)
    return _create_work_from_future(future).boxed()


_KERNELS: Mapping[str, Callable[..., Any]] = {
    "_allgather_base_": _gather,
    "_reduce_scatter_base_": _reduce_scatter,
    "scatter_": _scatter,
    "allreduce_": _reduce,
    "alltoall_base_": _exchange,
}
