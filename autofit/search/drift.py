"""Drift: how the speed of the machine changed during a search, inferred from configs measured more than once.

Other work starts and ends, and warm devices clock down: a config measured late is then slower for no reason of its own.
The search repeats its leader now and then, and the drift that repeats have in common is removed from all measurements.
It is modelled as a random walk over time, so one pair that differs within noise says little, several that agree much.
"""

import math
from collections.abc import Sequence

import numpy as np

from autofit.core.measurement import Measurement
from autofit.search.linear_model import Array

AGAIN_AFTER_SECONDS = 300.0  # of probing since the last repeat: a short search has no time to drift
AGAIN_AFTER_PROBES = 8  # at least, so that slow probes are not repeated again and again
# Of the walk in five minutes, as standard deviations of logarithms, weighted by their evidence.
_STEPS = (0.01, 0.04, 0.16)
_WIDE = 10.0  # the prior of how long a config takes


def slowdown(measurements: Sequence[Measurement], *, noise: float) -> Array:
    """The logarithm of how much slower the machine was at each measurement than at the last; 0 without repeats.

    The mean of a Gaussian process (Rasmussen and Williams, "Gaussian Processes for Machine Learning", algorithm 2.1):
    a config's own time, the walk back from the last measurement, and the noise of a measurement (a standard deviation
    of logarithms). The measurements come by number.
    """
    spent = np.cumsum([each.seconds for each in measurements])
    ago = (spent[-1:] - spent) / AGAIN_AFTER_SECONDS
    timed = [index for index, each in enumerate(measurements) if each.fits and each.step_seconds]
    configs = [measurements[index].config for index in timed]
    if len(set(configs)) == len(configs):
        return np.zeros(len(measurements))
    values = np.log([each.step_seconds.median for each in map(measurements.__getitem__, timed) if each.step_seconds])
    codes = np.unique([configs.index(config) for config in configs], return_inverse=True)[1]
    values, walk = values - values.mean(), np.minimum(ago[:, None], ago[timed][None, :])
    still = _WIDE**2 * (codes[:, None] == codes[None, :]) + noise**2 * np.eye(len(timed))
    evidence, means = [], []
    for step in _STEPS:
        lower = np.linalg.cholesky(step**2 * walk[timed] + still)
        solved = np.linalg.solve(lower, values)
        evidence.append(-0.5 * solved @ solved - np.log(np.diag(lower)).sum())
        means.append(step**2 * walk @ np.linalg.solve(lower.T, solved))
    weights = np.exp(np.array(evidence) - max(evidence))
    return np.asarray(weights @ np.array(means) / weights.sum())


def as_now(measurements: Sequence[Measurement], *, noise: float) -> list[Measurement]:
    """The measurements, corrected to the machine's speed at the last of them."""
    slower = slowdown(measurements, noise=noise).tolist()
    return [each.faster(math.exp(log)) if log else each for each, log in zip(measurements, slower, strict=True)]


def is_due(measurements: Sequence[Measurement]) -> bool:
    """Whether it is time to repeat a measurement, to see the machine drift."""
    first = {each.config: index for index, each in reversed(list(enumerate(measurements)))}
    repeat = max((index for index, each in enumerate(measurements) if first[each.config] < index), default=0)
    later = measurements[repeat + 1 :]
    long = len(later) >= AGAIN_AFTER_PROBES and sum(each.seconds for each in later) >= AGAIN_AFTER_SECONDS
    return long and any(each.fits for each in measurements)
