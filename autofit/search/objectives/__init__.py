"""What a search makes large: a number of a measured config, one file each."""

from typing import Protocol

from autofit.core.config import Config
from autofit.core.measurement import Measurement


class Objective(Protocol):
    """A speed that is divided by what a config costs otherwise."""

    def __call__(self, measurement: Measurement, config: Config) -> float:
        """The number of a measured config; 0 for what was not measured."""

    def discount(self, config: Config) -> float:
        """What the speed of a config is divided by, measured or not."""
