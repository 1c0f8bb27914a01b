"""Skeleton: a model without weights, whole or without most of its middle blocks."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.shallow_model import Cut, Depth, shorten, shorten_again
from autofit.hardware.tracker import StorageTracker
from autofit.training.meta_model import meta_model_from

# A deep model is followed by two of fewer blocks where these have at most such a share of its own.
_WORTH_IT = 0.75


@dataclass(frozen=True)
class Skeleton:
    """A model without weights, how its blocks stand for those of a deeper model, and the bytes that
    were alive at most while its factory made it, if a CPU trains it: masks and other tables, and
    weights where it needs real ones."""

    model: nn.Module
    depth: Depth | None = None
    made_with: int = 0

    @classmethod
    def whole(cls, workload: Workload, hardware: Hardware) -> Self:
        """The model with all of its blocks, its weights moved to meta where a factory made real
        ones."""
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

    def two_depths(self, cut: Cut) -> tuple[Self, Self] | None:
        """Two models of fewer blocks, the second of a period of blocks more than the first, whose
        steps tell what a step of this one does.

        None where it is not deep, or its blocks are not alike. This one is used up.
        """
        depth = shorten(self.model, cut, periods=2)
        if depth is None:
            return None
        if 2 * depth.retained - depth.period > _WORTH_IT * depth.whole:
            return None

        shallower = copy.deepcopy(self.model)
        retained = shorten_again(shallower, depth)

        return (
            replace(self, model=shallower, depth=replace(depth, retained=retained)),
            replace(self, depth=depth),
        )

    @classmethod
    def cut_short(cls, workload: Workload, hardware: Hardware, cut: Cut) -> Self:
        """The model without most of its middle blocks, if they are alike."""
        skeleton = cls.whole(workload, hardware)
        return replace(skeleton, depth=shorten(skeleton.model, cut))
