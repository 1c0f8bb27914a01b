"""What a search makes large: a number of a measured config, one file each."""

from collections.abc import Callable

from autofit.core.config import Config
from autofit.core.measurement import Measurement

Objective = Callable[[Measurement, Config], float]
