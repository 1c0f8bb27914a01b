"""A model on a card waits in the host's memory while probes measure there: they are to find the card as it will be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.errors import OutOfMemoryError
from autofit.hardware.out_of_memory import is_out_of_memory

_HOST = torch.device("cpu")


@contextmanager
def set_aside(model: nn.Module, *, leaves: str = "cuda") -> Iterator[None]:
    """Weights, their gradients, and buffers leave devices of a kind for the host, and come back at the end, however
    that comes about.

    The tensors stay the objects they are, so that optimizers and whoever else holds them still do; those that share
    memory share it in either place. Quantised and sparse weights stay where they are.

    Raises:
        OutOfMemoryError: others have taken the memory meanwhile; the model is in the host's, whole.
    """
    places = [(each, each.device, each.data_ptr()) for each in _dense(model) if each.device.type == leaves]
    try:
        _move((each, _HOST) for each, _, _ in places)
        if leaves == "cuda" and places:
            torch.cuda.empty_cache()  # PyTorch keeps what is let go, which for other processes is taken
        yield
    finally:
        try:
            _move((each, home) for each, home, address in places if (each.device, each.data_ptr()) != (home, address))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = "the model was set aside while a search ran, and its memory on the card was taken meanwhile."
            raise OutOfMemoryError(message, "It is in the host's memory now: free the card, and try again.") from error


def _dense(model: nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    every = [*parameters, *gradients, *model.buffers()]
    return [each for each in every if each.layout == torch.strided and not is_traceable_wrapper_subclass(each.data)]


@torch.inference_mode(mode=False)
@torch.no_grad()
def _move(places: Iterable[tuple[torch.Tensor, torch.device]]) -> None:
    """Give each tensor a copy of its memory on a device. All is copied before anything is let go: where that fails,
    everything is as it was."""
    copies: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
    moved = []
    for tensor, device in places:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), device
        if key not in copies:
            copies[key] = torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)
        copy = torch.empty(0, dtype=tensor.dtype, device=device)
        moved.append((tensor, copy.set_(copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())))
    for tensor, copy in moved:
        tensor.data = copy
