"""Models whose blocks are sent to the host as soon as their weights exist, and streamed from there."""

import functools

import torch
from torch import nn

from autofit.core.errors import RefusedError
from autofit.setup.host_copies import CopyLane
from autofit.setup.resting_weights import Block, Slot
from autofit.setup.state import Holder, Setup
from autofit.setup.streamed_blocks import LEAST_BLOCKS, BlockStreamer, Updated

TOO_FEW = (
    f"fewer than {LEAST_BLOCKS} repeated blocks have weights of their own worth streaming, "
    "and two are always on the device; use {}."
)


def stream_blocks(
    setup: Setup,
    model: nn.Module,
    blocks: list[nn.Module],
    lane: CopyLane,
    *,
    smallest: int,
    updated: Updated | None = None,
    instead: str = "none",
) -> BlockStreamer:
    """Send every weight of some blocks that may be streamed to the host as soon as it exists.

    Args:
        model: the trained one, or a frozen one; without weights so far.
        blocks: the ones of it to stream.
        updated: where trained weights are updated.
        instead: the value to use where it is refused.

    Raises:
        RefusedError: where too few blocks have weights of at least `smallest` bytes, counted in 4
            bits.
    """
    streamer = BlockStreamer(
        model,
        blocks,
        lane,
        smallest=smallest,
        whole=setup.config.compile != "none",
        updated=updated,
    )

    worth = set()
    for block, slot in streamer.slots():
        if getattr(*slot).numel() >= 2 * smallest:
            worth.add(id(block))
    if len(worth) < LEAST_BLOCKS:
        streamer.close()
        raise RefusedError(TOO_FEW.format(instead))

    for block, slot in streamer.slots():
        if getattr(*slot).dim() > 1:  # vectors are too small to be streamed
            block.awaited.add(slot)
            store = setup.weights.holders.get(slot)
            hold = functools.partial(_store_and_hold, streamer, block, slot, store)
            setup.weights.holders[slot] = hold
    return streamer


def _store_and_hold(
    streamer: BlockStreamer, block: Block, slot: Slot, store: Holder | None, values: torch.Tensor
) -> nn.Parameter:
    """The weight as another technique stores it, else as it is; moved to the host before the next
    one is made."""
    module, name = slot
    own = module._parameters[name]
    if store:
        parameter = store(values)
    elif own is not None and _is_the_same(own, values):
        parameter = own  # of a living model, which others may hold too
    else:
        parameter = nn.Parameter(values, requires_grad=own is not None and own.requires_grad)

    streamer.hold(block, slot, parameter)
    streamer.made(block, slot)
    return parameter


def _is_the_same(weight: torch.Tensor, values: torch.Tensor) -> bool:
    if weight.device != values.device:
        return False
    return weight.untyped_storage() is values.untyped_storage()
