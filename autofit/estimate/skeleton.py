"""Skeleton: a model without weights, whole or without most of its middle blocks."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import nn

from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.shallow_model import Cut, Depth, shorten, shorten_again
from autofit.hardware.tracker import StorageTracker
from autofit.setup.layers import repeated_blocks
from autofit.training.meta_model import meta_model_from

# Blocks that are counted from the first one, as the rest are from the last: a block's neighbours
# matter for it, and few others do.
FROM_START = 4


class Depths(NamedTuple):
    """Which models are followed by two of fewer blocks, and how few.

    Attributes:
        deep: models of more blocks are.
        least, most: the blocks of the two models, or up to a period of different blocks more.
    """

    deep: int
    least: int
    most: int


# Published decoders have 126 blocks at most, and are followed as a whole. Twice the longest period of
# different blocks, which is eight, lies between the two depths.
OF_DEEP = Depths(150, 16, 32)
# For a search in a hurry, one such period: what allocators reserve, by whole segments, is then known
# to a few percent only.
FEW = Depths(60, 8, 16)


@dataclass(frozen=True)
class Skeleton:
    """A model without weights, how its blocks stand for those of a deeper model, and the bytes that were alive at most
    while its factory made it, if a CPU trains it: masks and other tables, and weights where it needs real ones."""

    model: nn.Module
    depth: Depth | None = None
    made_with: int = 0

    @classmethod
    def whole(cls, workload: Workload, hardware: Hardware) -> Self:
        """The model with all of its blocks, its weights moved to meta where a factory made real ones."""
        tracker = StorageTracker()
        # models are made in the host's memory
        with tracker if hardware.device == "cpu" else nullcontext():
            model = meta_model_from(workload.model)
        moved: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    meta = nn.Parameter(
                        parameter.detach().to("meta"), requires_grad=parameter.requires_grad
                    )
                    module._parameters[name] = moved.setdefault(parameter, meta)
        return cls(model, made_with=tracker.peak)

    def two_depths(self, cut: Cut, depths: Depths) -> tuple[Self, Self] | None:
        """Two models of fewer blocks instead of a deep one, whose figures tell those of any depth.

        None where it is not that deep, or its blocks are not alike. This one is used up.
        """
        if len(repeated_blocks(self.model)) <= depths.deep:
            return None
        depth = shorten(self.model, cut, least=depths.most)
        if depth is None:
            return None

        shallower = copy.deepcopy(self.model)
        retained = shorten_again(shallower, depth, least=depths.least)
        return (
            replace(self, model=shallower, depth=replace(depth, retained=retained)),
            replace(self, depth=depth),
        )

    @classmethod
    def cut_short(cls, workload: Workload, hardware: Hardware, cut: Cut) -> Self:
        """The model without most of its middle blocks, if they are alike."""
        skeleton = cls.whole(workload, hardware)
        return replace(skeleton, depth=shorten(skeleton.model, cut))
