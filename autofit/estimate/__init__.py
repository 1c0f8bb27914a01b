"""Predicting: memory and time of any Config, from a trace of the real training step on tensors without storage.

This room needs neither the device nor weights. `predict` says all about one Config, `predict_all` the main figures of
thousands; what a real measurement shows flows back by `learn`.
"""

from autofit.estimate.calibration import Calibration, Seen, calibration_for, compared, learn
from autofit.estimate.estimator import predict
from autofit.estimate.rates import Rates, rates_for, rates_of
from autofit.estimate.space_estimator import SpaceEstimator, predict_all
from autofit.estimate.timeline import timeline_of, timelines
from autofit.estimate.trace import Trace, trace

__all__ = [
    "predict",
    "predict_all",
    "SpaceEstimator",
    "trace",
    "Trace",
    "timeline_of",
    "timelines",
    "Rates",
    "rates_for",
    "rates_of",
    "Calibration",
    "calibration_for",
    "Seen",
    "compared",
    "learn",
]
