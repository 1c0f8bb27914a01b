"""Losses for what models of transformers do not compute by themselves: `autofit.losses`.

Each is a function of (model, batch), or of (models, batch) where it asks further models, made with
its options: `autofit.fit(model, loader, loss=autofit.losses.DPO(beta=0.1))`. A new one is a file
here, a file of `core.tasks`, and its line below.
"""

from autofit.models.losses.distill import Distill
from autofit.models.losses.dpo import DPO
from autofit.models.losses.kto import KTO
from autofit.models.losses.orpo import ORPO
from autofit.models.losses.reward import Reward
from autofit.models.losses.simpo import SimPO

__all__ = ["DPO", "KTO", "ORPO", "Distill", "Reward", "SimPO"]

# By the name of the task that each is of.
LOSSES = {loss.task: loss for loss in (DPO, KTO, ORPO, SimPO, Reward, Distill)}
