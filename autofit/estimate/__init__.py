"""Estimates: memory and time of any Config, from a trace of the real training step on tensors without storage.

Needs neither the device nor weights. `predict` estimates one Config in full, `predict_all` the main figures of
thousands; `learn` corrects predictions by measurements.
"""

from autofit.estimate.calibration import Calibration, Comparison, calibration_for, compare, learn
from autofit.estimate.estimator import predict
from autofit.estimate.rates import Rates, rates_for, rates_of
from autofit.estimate.space_estimator import SpaceEstimator, predict_all
from autofit.estimate.timeline import timeline, timeline_of
from autofit.estimate.trace import Trace, trace

__all__ = [
    "Calibration",
    "Comparison",
    "Rates",
    "SpaceEstimator",
    "Trace",
    "calibration_for",
    "compare",
    "learn",
    "predict",
    "predict_all",
    "rates_for",
    "rates_of",
    "timeline",
    "timeline_of",
    "trace",
]
