"""The user's own model: on the host while probes measure, and back in its modes and dtypes after training."""

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
    """Move weights, gradients and buffers off devices of a type, so that probes find the card as training will. Tensors
    stay the same objects, so optimizers and other holders keep them; those that share memory still do. Quantised and
    sparse weights stay where they are. If the memory is taken meanwhile (OutOfMemoryError), the model stays whole on
    the host."""
    homes = [(t, t.device, t.data_ptr()) for t in _dense(model) if t.device.type == device_type]
    try:
        _move((tensor, _HOST) for tensor, _, _ in homes)
        if device_type == "cuda" and homes:
            torch.cuda.empty_cache()  # other processes cannot use what PyTorch caches
        yield
    finally:
        try:
            _move(
                (t, device)
                for t, device, address in homes
                if (t.device, t.data_ptr()) != (device, address)
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = "the model was set aside while a search ran, and its memory on the card was taken meanwhile."
            raise OutOfMemoryError(
                message, "It is in the host's memory now: free the card, and try again."
            ) from error


def _dense(model: nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    tensors = [*parameters, *gradients, *model.buffers()]
    return [
        t
        for t in tensors
        if t.layout == torch.strided and not is_traceable_wrapper_subclass(t.data)
    ]


@torch.inference_mode(mode=False)
@torch.no_grad()
def _move(targets: Iterable[tuple[torch.Tensor, torch.device]]) -> None:
    """Give each tensor a copy of its memory on a device; all or none, since all are copied before any is freed."""
    copies: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
    moved = []
    for tensor, device in targets:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), device
        if key not in copies:
            copies[key] = torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)
        copy = torch.empty(0, dtype=tensor.dtype, device=device)
        moved.append(
            (
                tensor,
                copy.set_(copies[key], tensor.storage_offset(), tensor.size(), tensor.stride()),
            )
        )
    for tensor, copy in moved:
        tensor.data = copy


def dtypes_to_restore(model: nn.Module, settings: Mapping[str, Any]) -> Dtypes | None:
    """The dtypes of trained and of frozen weights to return them in; None where the settings ask for others. Beside
    adapters, and below a head that is trained alone, all present weights may be frozen."""

    def choices(knob: str, off: Any) -> list[Any]:
        given = settings.get(knob, off)
        return (
            list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        )

    def dtypes(weights: list[nn.Parameter]) -> tuple[str, ...]:
        return tuple(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}))

    if "precision" in settings or choices("quantization", "none") != ["none"]:
        return None
    ranks = choices("lora_rank", 0)
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    trained = [weight for weight in weights if weight.requires_grad] if 0 in ranks else []
    frozen = (
        weights
        if any(ranks) or any(choices("head_only", False))
        else [weight for weight in weights if not weight.requires_grad]
    )
    return dtypes(trained), dtypes(frozen)


@contextmanager
def restored(model: nn.Module, *, dtypes: bool) -> Iterator[None]:
    """Restore train or eval mode of every module on exit and, with `dtypes`, the dtypes of weights and buffers."""
    modes = modes_of(model)
    parameters = (
        [(parameter, parameter.dtype) for parameter in model.parameters()] if dtypes else []
    )
    holders = model.modules() if dtypes else ()
    buffers = [
        (each, name, b.dtype)
        for each in holders
        for name, b in each._buffers.items()
        if b is not None
    ]
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
