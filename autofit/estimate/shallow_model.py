"""Depth: a model of repeated blocks cut short, and what is needed to speak of the whole again.

What one block more costs is read off blocks in the middle, whose surroundings are those of any other in the middle. The
first and the last stay as they are: before the first there is an embedding, after the last a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from autofit.setup.blocks import repeated_blocks

FIRST = 1  # blocks before those in the middle
_LONGEST_PERIOD = 8  # blocks: Gemma 3 has five of one kind and one of another; hybrids repeat every eight


@dataclass(frozen=True)
class Depth:
    """How a cut model stands for a deep one.

    Of `whole` blocks, `kept` were kept: the first, `period` ones that stand for `repeats` times as many, the rest.
    """

    whole: int
    kept: int
    period: int
    repeats: int

    @property
    def standing_for(self) -> range:
        """The kept blocks that each stand for `repeats` blocks."""
        return range(FIRST, FIRST + self.period)

    def times(self, block: int | None) -> int:
        """How many blocks one kept block stands for."""
        return self.repeats if block is not None and block in self.standing_for else 1


def cut(model: nn.Module, *, alternating: bool) -> Depth | None:
    """Take blocks out of the middle of the model; None where its blocks are not alike, or too few to be worth it.

    Args:
        alternating: every second block is treated in another way (checkpointing).
    """
    blocks = repeated_blocks(model)
    homes = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    home = next((each for each in homes if blocks and list(each) == blocks), None)
    if home is None:
        return None
    period = _period([_signature(model, block, place) for place, block in enumerate(blocks)], alternating)
    if period is None:
        return None
    kept = FIRST + 1 + period + (len(blocks) - FIRST - 1) % period
    if kept >= len(blocks):
        return None
    del home[FIRST + period : FIRST + period + len(blocks) - kept]
    return Depth(len(blocks), kept, period, 1 + (len(blocks) - kept) // period)


def _period(signatures: list[object], alternating: bool) -> int | None:
    """After how many blocks the same ones follow again, but for the first and the last."""
    for period in range(2 if alternating else 1, _LONGEST_PERIOD + 1, 2 if alternating else 1):
        middle = signatures[FIRST:-1]
        if len(middle) >= period and all(a == b for a, b in zip(middle, middle[period:], strict=False)):
            return period
    return None


def _signature(model: nn.Module, block: nn.Module, place: int) -> tuple[object, ...]:
    """What makes two blocks alike: their modules and the shapes of their weights, and the kind their config names."""
    kinds = getattr(getattr(model, "config", None), "layer_types", None)
    weights = tuple((name, tuple(each.shape), each.dtype) for name, each in block.named_parameters())
    modules = tuple(type(each) for each in block.modules())
    return modules, weights, kinds[place] if kinds and len(kinds) > place else None
