"""What of a BlockStreamer's weights is where."""

import gc
from typing import Any

import torch

from autofit.setup import Setup
from autofit.setup.streamed_blocks import BlockStreamer
from autofit.training.step import train_step


def resident_bytes(streamer: BlockStreamer) -> int:
    """Bytes of the streamed weights that are on the device now."""
    return sum(memory.storage.nbytes() for block in streamer.blocks for memory in block.memories)


def streamed_bytes(streamer: BlockStreamer) -> int:
    """Bytes of all streamed weights."""
    return sum(memory.host.numel() for block in streamer.blocks for memory in block.memories)


def gradient_bytes(streamer: BlockStreamer) -> int:
    """Bytes of their gradients that are on the device now."""
    found = [weight.weight.grad for block in streamer.blocks for weight in block.resting.values()]
    return sum(gradient.untyped_storage().nbytes() for gradient in found if gradient is not None)


def trained_on_card(setup: Setup, batch: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """The peak of the last of three steps on a card, and the weights after it; the setup is closed."""
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        train_step(setup, batch)
    peak, weights = (
        torch.cuda.max_memory_allocated(),
        {name: value.cpu() for name, value in setup.trained_values()},
    )
    setup.close()
    gc.collect()
    torch.cuda.empty_cache()
    return peak, weights
