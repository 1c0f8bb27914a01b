"""Named tensors in host memory, as files and other processes get them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autofit.core.errors import InputError
from autofit.distributed import Ranks
from autofit.setup.sharding import whole

Tensors = dict[str, torch.Tensor]  # by their names


def detached(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Tensors as safetensors takes them: on the host, contiguous, and sharing no memory.

    Raises InputError for a dtype that safetensors lacks.
    """
    detached = {}
    addresses = set()

    for name, tensor in named:
        if tensor.dtype is torch.complex128:
            raise InputError(
                f"{name} is of complex128, which safetensors cannot hold.", "Make it complex64."
            )

        plain = tensor.detach().cpu().contiguous()
        address = storage_address(plain)
        held_bytes = plain.untyped_storage().nbytes()
        if address in addresses or held_bytes != plain.numel() * plain.itemsize:
            plain = plain.clone(memory_format=torch.contiguous_format)

        addresses.add(address)
        detached[name] = plain

    return detached


def storage_address(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor lies; of one without memory, a number of its own."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The values of a tensor, in its own order of dimensions."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def each_once(tensors: Tensors) -> Tensors:
    """Without further names of the same tensor, which safetensors does not take."""
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensors[name].contiguous() for name in names.values()}


@torch.no_grad()
def gathered(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> Tensors:
    """Whole tensors, in the first rank's host memory, one after the other; tied ones stay the same.

    Several ranks call this together, and others than the first get none. Of a pipeline, the first
    rank gets those of all stages. On one device, the tensors stay as they are.
    """
    if not ranks.are_several:
        return dict(tensors)

    found: Tensors = {}
    is_held = ranks.rank % ranks.layout.stage_world == 0  # by the first of the stage
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        local = tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local()

        place = (storage_address(local), local.storage_offset(), tensor.shape)
        first = names.setdefault(place, name)

        if first == name:
            full = whole(tensor.detach())
            if is_held:
                found[name] = full.cpu()
        elif is_held:
            found[name] = found[first]

    if ranks.layout.pipeline > 1:
        _send_to_first(found, ranks)
    return found if ranks.is_first else {}


def _send_to_first(found: Tensors, ranks: Ranks) -> None:
    """Give the first rank what the first ones of other stages have found."""
    own = {(ranks.rank, name): (tensor.shape, tensor.dtype) for name, tensor in found.items()}
    for (rank, name), (shape, dtype) in ranks.joined(own).items():
        if rank == 0:
            continue
        if rank == ranks.rank:
            dist.send(found[name].contiguous(), 0)
        elif ranks.is_first:
            received = torch.empty(shape, dtype=dtype)
            dist.recv(received, rank)
            found.setdefault(name, received)
