"""How a living model comes back from training: each module in the mode that it came in, and each weight in its format
(dtype), where nobody asked for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Formats = tuple[tuple[str, ...], tuple[str, ...]]


def formats_to_keep(model: nn.Module, settings: Mapping[str, Any]) -> Formats | None:
    """The formats of what will be trained, and of what will be frozen; None where the settings ask for others.

    Beside adapters all that there is now is frozen.
    """
    if "precision" in settings or _given(settings, "quantization", "none") != ["none"]:
        return None
    ranks = _given(settings, "lora_rank", 0)
    weights = [each for each in model.parameters() if each.is_floating_point()]
    trained = [each for each in weights if each.requires_grad] if 0 in ranks else []
    frozen = weights if any(ranks) else [each for each in weights if not each.requires_grad]
    return _named(trained), _named(frozen)


@contextmanager
def given_back(model: nn.Module, *, formats: bool) -> Iterator[None]:
    """At the end modules are in train or eval mode as they are now, and `formats`: what there is of weights and buffers
    by then has the format that it has now."""
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(each, each.dtype) for each in model.parameters()] if formats else []
    buffers = [
        (module, name, each.dtype)
        for module in (model.modules() if formats else ())
        for name, each in module._buffers.items()
        if each is not None
    ]
    try:
        yield
    finally:
        model.train(modes[0][1])  # what has come since: adapters
        for module, mode in modes:
            module.training = mode
        for parameter, dtype in parameters:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        for module, name, dtype in buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(dtype)


def _given(settings: Mapping[str, Any], knob: str, off: Any) -> list[Any]:
    given = settings.get(knob, off)
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _named(weights: Sequence[torch.Tensor]) -> tuple[str, ...]:
    return tuple(sorted({str(each.dtype).removeprefix("torch.") for each in weights}))
