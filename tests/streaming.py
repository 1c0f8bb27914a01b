"""What of a BlockStreamer's weights is where."""

from autofit.setup.streamed_blocks import BlockStreamer


def resident_bytes(streamer: BlockStreamer) -> int:
    """Bytes of the streamed weights that are on the device now."""
    return sum(weight.storage.nbytes() for block in streamer.blocks for weight in block.resting.values())


def streamed_bytes(streamer: BlockStreamer) -> int:
    """Bytes of all streamed weights."""
    return sum(weight.host.numel() for block in streamer.blocks for weight in block.resting.values())


def gradient_bytes(streamer: BlockStreamer) -> int:
    """Bytes of their gradients that are on the device now."""
    found = [weight.weight.grad for block in streamer.blocks for weight in block.resting.values()]
    return sum(gradient.untyped_storage().nbytes() for gradient in found if gradient is not None)
