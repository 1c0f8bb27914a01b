"""The learning rate of a config where none is given.

Adapters take about ten times that of full fine-tuning (Schulman et al. 2025, "LoRA without
regret"); with a constant lora_alpha it is the same for all ranks.
"""

from collections.abc import Mapping
from typing import Any

from autofit.core.result import tier
from autofit.core.workload import Hyperparameters

_FULL = 2e-5
_ADAPTERS = 2e-4  # also of a head that is trained alone


def default_learning_rate(config: Mapping[str, Any]) -> float:
    """2e-5 where all weights are trained, 2e-4 where few are added or trained."""
    return _FULL if tier(config) == "full" else _ADAPTERS


def learning_rate_note(config: Mapping[str, Any]) -> str:
    """A sentence on the rate that is taken."""
    rate = default_learning_rate(config)
    if rate == _FULL:
        return (
            f"lr is not given: the learning rate is {rate:g}, as full fine-tuning takes; a model "
            "that starts from random weights takes more."
        )
    return f"lr is not given: the learning rate is {rate:g}, as adapters and new heads take."


def default_hyperparameters(config: Mapping[str, Any]) -> Hyperparameters:
    """How a config learns where nothing is said."""
    return Hyperparameters(lr=default_learning_rate(config))
