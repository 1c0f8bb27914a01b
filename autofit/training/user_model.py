"""The user's own model: on the host while probes measure, and restored after training.

What is restored are its modes and dtypes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.errors import OutOfMemoryError
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup.state import modes_of, set_modes

_HOST = torch.device("cpu")
Dtypes = tuple[tuple[str, ...], tuple[str, ...]]


@contextmanager
def moved_to_host(model: nn.Module, *, device_type: str = "cuda") -> Iterator[None]:
    """Move weights, gradients and buffers off devices of a type while inside.

    So probes find the card as training will. Tensors stay the same objects, so optimizers and
    others that refer to them keep them; those that share memory still do. Quantised and sparse
    weights stay where they are. If the memory is taken meanwhile (OutOfMemoryError), the model
    stays whole on the host.
    """
    tensors = [tensor for tensor in _dense(model) if tensor.device.type == device_type]
    homes = [(tensor, tensor.device, tensor.data_ptr()) for tensor in tensors]

    try:
        _move((tensor, _HOST) for tensor in tensors)
        if device_type == "cuda" and tensors:
            torch.cuda.empty_cache()  # other processes cannot use what PyTorch caches

        yield
    finally:
        away = []
        for tensor, device, address in homes:
            if tensor.device != device or tensor.data_ptr() != address:
                away.append((tensor, device))

        try:
            _move(away)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

            message = (
                "the model was set aside while a search ran, and its memory on the card was taken"
                " meanwhile."
            )
            remedy = "It is in the host's memory now: free the card, and try again."
            raise OutOfMemoryError(message, remedy) from error


def _dense(model: nn.Module) -> Iterator[torch.Tensor]:
    """Weights, gradients and buffers that are neither sparse nor quantised."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for tensor in (*parameters, *gradients, *model.buffers()):
        if tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor.data):
            yield tensor


@torch.inference_mode(mode=False)
@torch.no_grad()
def _move(targets: Iterable[tuple[torch.Tensor, torch.device]]) -> None:
    """Give each tensor a copy of its memory on a device.

    All are copied before any is freed, so either all move or none.
    """
    copies: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
    moved = []
    for tensor, device in targets:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), device
        if key not in copies:
            copies[key] = torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)

        copy = torch.empty(0, dtype=tensor.dtype, device=device)
        copy.set_(
            copies[key],
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        moved.append((tensor, copy))

    for tensor, copy in moved:
        tensor.data = copy


def dtypes_to_restore(model: nn.Module, settings: Mapping[str, Any]) -> Dtypes | None:
    """The dtypes of trained and of frozen weights to return them in.

    None where the settings ask for others. Beside adapters, and below a head that is trained alone,
    all present weights may be frozen.
    """

    def choices(knob: str, off: Any) -> list[Any]:
        given = settings.get(knob, off)
        if isinstance(given, Sequence) and not isinstance(given, str):
            return list(given)

        return [given]

    if "precision" in settings or choices("quantization", "none") != ["none"]:
        return None

    ranks = choices("lora_rank", 0)
    trains_all = 0 in ranks
    freezes_all = any(ranks) or any(choices("head_only", False))
    trained = set()
    frozen = set()
    for weight in model.parameters():
        if not weight.is_floating_point():
            continue

        dtype = str(weight.dtype).removeprefix("torch.")
        if weight.requires_grad and trains_all:
            trained.add(dtype)
        if freezes_all or not weight.requires_grad:
            frozen.add(dtype)

    return tuple(sorted(trained)), tuple(sorted(frozen))


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.dtype]]:
    """Each buffer's module, name and dtype."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer.dtype


@contextmanager
def restored(model: nn.Module, *, dtypes: bool) -> Iterator[None]:
    """Restore train or eval mode of every module on exit.

    With `dtypes`, also the dtypes of weights and buffers.
    """
    modes = modes_of(model)
    parameters = []
    buffers = []
    if dtypes:
        parameters = [(parameter, parameter.dtype) for parameter in model.parameters()]
        buffers = list(_buffers(model))

    try:
        yield
    finally:
        model.train(modes[model])  # also of modules added since: adapters
        set_modes(modes)

        for parameter, dtype in parameters:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)

        for module, name, dtype in buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(dtype)
