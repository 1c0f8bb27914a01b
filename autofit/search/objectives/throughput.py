"""Samples a second: configs of a search learn from equally many samples a step, so that this compares their speed."""

from autofit.core.config import Config
from autofit.core.measurement import Measurement


def throughput(measurement: Measurement, config: Config) -> float:
    """Samples a second; 0 for what was not measured."""
    return measurement.throughput
