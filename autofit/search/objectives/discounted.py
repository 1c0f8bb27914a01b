"""Discounted speed: throughput, divided for all that makes a config learn less faithfully, and for
what it computes before its first step."""

from dataclasses import dataclass

from autofit.core.before_training import share_before_training
from autofit.core.config import Config
from autofit.core.faithfulness import losses, tier_steps
from autofit.core.measurement import Measurement
from autofit.core.options import BALANCED, FAITHFUL, FAST


@dataclass(frozen=True)
class DiscountedSpeed:
    """How much faster a config must be to be worth what it costs in faithfulness.

    What is computed before the first step counts as in a training of one epoch, the usual one.

    Attributes:
        tier_step: times, for each step of tier.
        loss: times, for each lossy value.
    """

    tier_step: float
    loss: float

    def __call__(self, measurement: Measurement, config: Config) -> float:
        """Samples a second, discounted; 0 for what was not measured."""
        return measurement.throughput / self.discount(config)

    def discount(self, config: Config) -> float:
        """What the speed of a config is divided by."""
        faithfulness = self.tier_step ** tier_steps(config) * self.loss ** losses(config)
        return float(faithfulness * (1 + share_before_training(config)))


RAW_SPEED = DiscountedSpeed(1.0, 1.0)
# LoRA needs two thirds of the arithmetic of full training, so that a step of tier must pay a little
# more than what it saves in any case. "faithful": no speed makes up for a loss, nor any number of
# losses for a step of tier.
PREFERENCES = {
    FAITHFUL: DiscountedSpeed(1e30, 1e6),
    BALANCED: DiscountedSpeed(1.3, 1.1),
    FAST: RAW_SPEED,
}
