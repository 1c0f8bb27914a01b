"""Drift: how the speed of the machine changed during a search, inferred from repeated configs.

Other work starts and ends, and warm devices clock down: a config measured late is then slower for
no reason of its own. The search repeats its leader now and then, and the drift that repeats have
in common is removed from all measurements. It is modelled as a random walk over time, so one pair
that differs within noise says little, several that agree much.
"""

import math
from collections.abc import Iterable

import numpy as np

from autofit.core.config import Config
from autofit.core.measurement import Measurement
from autofit.search.linear_model import Array
from autofit.search.ranking import Measurements

AGAIN_AFTER_SECONDS = 300.0  # of probing since the last repeat: a short search has no time to drift
AGAIN_AFTER_PROBES = 8  # at least, so that slow probes are not repeated again and again
# Of the walk in five minutes: standard deviations of logarithms, weighted by their evidence.
_STEPS = (0.01, 0.04, 0.16)
_DISTURBED = 1.15  # times as long as a later measurement of the same config
_WIDE = 10.0  # the prior of how long a config takes


def step_times(measurements: Iterable[Measurement]) -> tuple[list[Config], list[float]]:
    """The configs of all measurements that fit, and the seconds of a step of each."""
    configs = []
    seconds = []
    for measurement in measurements:
        if measurement.fits and measurement.step_seconds:
            configs.append(measurement.config)
            seconds.append(measurement.step_seconds.median)

    return configs, seconds


def slowdown(measurements: Measurements, *, noise: float) -> Array:
    """The logarithm of how much slower the machine was at each measurement than at the last.

    The mean of a Gaussian process (Rasmussen and Williams, "Gaussian Processes for Machine
    Learning", algorithm 2.1) that adds a config's own time, the walk back from the last
    measurement, and the noise of a measurement. 0 without repeats.

    Args:
        measurements: by number.
        noise: standard deviation of logarithms of step times.
    """
    configs, seconds = step_times(measurements)
    if len(set(configs)) == len(configs):
        return np.zeros(len(measurements))

    # The walk's covariance: the time, in units of five minutes, from the later of two to the end.
    spent = np.cumsum([measurement.seconds for measurement in measurements])
    ago = (spent[-1:] - spent) / AGAIN_AFTER_SECONDS
    timed = []
    for index, measurement in enumerate(measurements):
        if measurement.fits and measurement.step_seconds:
            timed.append(index)
    walk = np.minimum(ago[:, None], ago[timed][None, :])

    values = np.log(seconds)
    values = values - values.mean()

    # A config's own time, the same in all of its measurements, and their noise.
    first = np.array(list(map(configs.index, configs)))  # of each config, in this order
    same_config = first[:, None] == first[None, :]
    steady = _WIDE**2 * same_config + noise**2 * np.eye(len(timed))

    # How likely each size of the walk's steps is, and the walk that it expects.
    evidence = []
    means = []
    for step in _STEPS:
        lower = np.linalg.cholesky(step**2 * walk[timed] + steady)
        solved = np.linalg.solve(lower, values)
        determinant = np.log(np.diag(lower)).sum()
        evidence.append(-0.5 * solved @ solved - determinant)

        weights = np.linalg.solve(lower.T, solved)
        means.append(step**2 * walk @ weights)

    likelihoods = np.exp(np.array(evidence) - max(evidence))
    return np.asarray(likelihoods @ np.array(means) / likelihoods.sum())


def as_now(measurements: Measurements, *, noise: float) -> list[Measurement]:
    """The measurements, corrected to the machine's speed at the last of them.

    Without those that took so much longer than a later one of the same config that something else
    must have disturbed them.
    """
    corrected: list[Measurement] = []
    fastest: dict[Config, float] = {}
    slower = slowdown(measurements, noise=noise).tolist()
    for measurement, logarithm in zip(reversed(measurements), reversed(slower), strict=True):
        if logarithm:
            measurement = measurement.faster(math.exp(logarithm))

        later = fastest.get(measurement.config, 0.0)
        if _DISTURBED * measurement.throughput >= later:
            corrected.append(measurement)
            fastest[measurement.config] = max(later, measurement.throughput)

    return corrected[::-1]


def is_due(measurements: Measurements) -> bool:
    """Whether it is time to repeat a measurement, to see the machine drift."""
    configs = set()
    repeat = 0
    for index, measurement in enumerate(measurements):
        if measurement.config in configs:
            repeat = index
        configs.add(measurement.config)

    later = measurements[repeat + 1 :]
    if len(later) < AGAIN_AFTER_PROBES:
        return False
    seconds = sum(measurement.seconds for measurement in later)
    if seconds < AGAIN_AFTER_SECONDS:
        return False
    return any(measurement.fits for measurement in measurements)
