"""The model without its adapters: what it was before they were trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autofit.setup.adapters import is_adapter
from autofit.setup.state import Setup, evaluation_mode


def without_adapters(setup: Setup, /, *args: Any, **options: Any) -> Any:
    """Call the model with its adapters off, without gradients and dropout."""
    model = setup.model
    with torch.no_grad(), evaluation_mode(model), _adapters_off(model):
        output = model(*args, **options)

    setup.exchange.reshard()
    return output


@contextmanager
def _adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, layers are as if they had no adapters.

    By peft's own mark: its `enable_adapters` changes what is trained, too.
    """
    layers: list[Any] = [module for module in model.modules() if is_adapter(module)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True

    try:
        yield
    finally:
        for layer, is_off in zip(layers, before, strict=True):
            layer._disable_adapters = is_off
