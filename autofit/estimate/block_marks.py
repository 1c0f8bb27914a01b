"""Marks in a recorded step: where the forwards and backwards of blocks begin and end."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from autofit.estimate.recorder import Recorder
from autofit.estimate.shallow_model import FROZEN, Depth
from autofit.setup import Setup
from autofit.setup.layers import repeated_blocks


def models_of_one_depth(setup: Setup) -> list[nn.Module]:
    """The trained model and its copies, whose blocks stand for those of a deeper one where its
    blocks do."""
    asked = setup.workload.frozen
    return [
        setup.model,
        *(model for name, model in setup.frozen.items() if asked[name] is None),
    ]


def mark_block(
    block: nn.Module,
    number: int,
    setup: Setup,
    recorder: Recorder,
    *,
    last: bool,
) -> Iterator[Any]:
    """Hooks that mark where a block's forward begins, where the last one's ends, and where its
    backward begins; all in one phase, that of the state, before the step."""

    def mark(phase: str, number: int | None = None) -> None:
        recorder.mark(phase if recorder.phase else "state", number)

    def begin(*_: Any) -> None:
        if setup.progress.phase == "forward" and torch.is_grad_enabled():
            mark("forward", number)

    def end(_: nn.Module, args: Any, output: Any) -> None:
        if setup.progress.phase == "forward" and torch.is_grad_enabled():
            if last:
                mark("forward")

            for value in tree_iter(output):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(lambda _: mark("backward", number))
                    break

    yield block.register_forward_pre_hook(begin)
    yield block.register_forward_hook(end)


def without_gradients(setup: Setup, depth: Depth | None) -> list[tuple[nn.Module, int | None]]:
    """The blocks of models that run without gradients, copies of the trained one or itself; FROZEN
    beside those that stand for others."""
    if depth is None:
        return []

    trained, *models = models_of_one_depth(setup)
    if setup.stand_ins or setup.tracing.whole_batch is not None:
        models.append(trained)

    blocks: list[tuple[nn.Module, int | None]] = []
    for model in models:
        for number, block in enumerate(repeated_blocks(model)):
            blocks.append((block, FROZEN if number in depth.middle else None))

    return blocks


def mark_without_gradients(
    block: nn.Module,
    mark: int | None,
    setup: Setup,
    recorder: Recorder,
) -> Any:
    """A hook that marks where a block that runs without gradients begins, and so where the one
    before ends."""

    def begin(*_: Any) -> None:
        if setup.progress.phase == "forward" and not torch.is_grad_enabled():
            recorder.mark("forward", mark)

    return block.register_forward_pre_hook(begin)
