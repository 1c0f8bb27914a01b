"""Losses for what models of transformers do not compute by themselves: `autofit.losses`.

Each is a function of (model, batch), or of (models, batch) where it asks further models, made with
its options: `autofit.fit(model, loader, loss=autofit.losses.DPO(beta=0.1))`. A new one is a file
here, a file of `core.tasks`, and its line below.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from autofit.core.errors import InputError, require, unknown
from autofit.models.losses.by_token import by_token
from autofit.models.losses.diffusion import Diffusion
from autofit.models.losses.distill import Distill
from autofit.models.losses.dpo import DPO
from autofit.models.losses.embed import Embed, EmbedByMicroBatch
from autofit.models.losses.generative_rerank import GenerativeRerank
from autofit.models.losses.grpo import GRPO
from autofit.models.losses.in_tiles import InTiles
from autofit.models.losses.kto import KTO
from autofit.models.losses.orpo import ORPO
from autofit.models.losses.rerank import Rerank
from autofit.models.losses.reward import Reward
from autofit.models.losses.simpo import SimPO

__all__ = [
    "DPO",
    "GRPO",
    "KTO",
    "ORPO",
    "Diffusion",
    "Distill",
    "Embed",
    "GenerativeRerank",
    "Rerank",
    "Reward",
    "SimPO",
    "by_token",
]

# By the name of the task that each is of.
LOSSES = {
    loss.task: loss
    for loss in (
        DPO,
        KTO,
        ORPO,
        SimPO,
        GRPO,
        Reward,
        Rerank,
        GenerativeRerank,
        Distill,
        Diffusion,
        Embed,
    )
}

# Losses that a tool computes in place of the model's own, by its name.
OF_TOOLS = {loss.tool: loss for loss in (InTiles, EmbedByMicroBatch)}


def with_options(loss: Any, options: Mapping[str, Any]) -> Any:
    """The loss with other options.

    Raises:
        InputError: it has none, none of that name, or does not take that value.
    """
    require(isinstance(options, Mapping), "loss_options must be a mapping", options)
    if not options:
        return loss
    if not dataclasses.is_dataclass(loss) or isinstance(loss, type):
        message = "this task has no loss with options."
        raise InputError(message, "Leave the options of the loss out.")

    names = [field.name for field in dataclasses.fields(loss)]
    for name, value in options.items():
        if name not in names:
            raise unknown("option of the loss", name, names)
        kind = type(getattr(loss, name))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_wrong = {
            float: not is_number,
            int: not isinstance(value, int) or isinstance(value, bool),
            str: not isinstance(value, str),
        }
        if is_wrong.get(kind):
            raise InputError(
                f"{name} cannot be {value!r}.", f"It is {getattr(loss, name)} by default."
            )

    return dataclasses.replace(loss, **options)
