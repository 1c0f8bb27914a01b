"""How the speed of the machine itself changed during a search: seen where one config was measured more than once.

Other work begins and ends beside a search, and devices grow warm and clock down: a config measured late is then slower
than one measured early, for no reason of its own. The search measures its leader again now and then, and what such
repeats have in common is taken out of all measurements. The change is taken to be a random walk over time, so that two
repeats that differ by no more than measurements do anyway say little, and several that agree say much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autofit.core.measurement import Measurement
from autofit.search.linear_model import Array

AGAIN_AFTER_SECONDS = 300.0  # of probing since one last repeated another: a short search has no time to drift
AGAIN_AFTER_PROBES = 8  # at least: what is slow to measure shall not be measured again and again
# Of the walk, in five minutes, as standard deviations of logarithms; what repeats show makes one likelier than others.
_STEPS = (0.01, 0.04, 0.16)
_WIDE = 10.0  # nothing is known beforehand of how long a config takes


def slowdown(measurements: Sequence[Measurement], *, noise: float) -> Array:
    """The logarithm of how much longer everything took at each measurement than at the last: 0 where nothing tells.

    The mean of a Gaussian process (Rasmussen and Williams, "Gaussian Processes for Machine Learning", algorithm 2.1):
    a config's own time, the walk back from the last measurement, and the noise of a measurement.

    Args:
        measurements: by number.
        noise: of a measurement, as a standard deviation of logarithms.
    """
    spent = np.cumsum([each.seconds for each in measurements])
    ago = (spent[-1:] - spent) / AGAIN_AFTER_SECONDS
    timed = [place for place, each in enumerate(measurements) if each.fits and each.step_seconds]
    configs = [measurements[place].config for place in timed]
    if len(set(configs)) == len(configs):
        return np.zeros(len(measurements))
    values = np.log([each.step_seconds.median for each in map(measurements.__getitem__, timed) if each.step_seconds])
    codes = np.unique([configs.index(config) for config in configs], return_inverse=True)[1]
    values, walk = values - values.mean(), np.minimum(ago[:, None], ago[timed][None, :])
    still = _WIDE**2 * (codes[:, None] == codes[None, :]) + noise**2 * np.eye(len(timed))
    evidence, means = [], []
    for step in _STEPS:
        lower = np.linalg.cholesky(step**2 * walk[timed] + still)
        known = np.linalg.solve(lower, values)
        evidence.append(-0.5 * known @ known - np.log(np.diag(lower)).sum())
        means.append(step**2 * walk @ np.linalg.solve(lower.T, known))
    weights = np.exp(np.array(evidence) - max(evidence))
    return np.asarray(weights @ np.array(means) / weights.sum())


def as_now(measurements: Sequence[Measurement], *, noise: float) -> list[Measurement]:
    """The measurements as they would be had the machine always been as fast as at the last of them."""
    slower = slowdown(measurements, noise=noise)
    if not slower.any():
        return list(measurements)
    return [
        each.taking(each.step_seconds.median / math.exp(by)) if each.fits and each.step_seconds else each
        for each, by in zip(measurements, slower.tolist(), strict=True)
    ]


def is_due(measurements: Sequence[Measurement]) -> bool:
    """Whether it is time to measure something again, to see whether the machine is still as fast as it was."""
    seen, since = set(), 0
    for place, each in enumerate(measurements):
        if each.config in seen:
            since = place
        seen.add(each.config)
    later = measurements[since + 1 :]
    long = len(later) >= AGAIN_AFTER_PROBES and sum(each.seconds for each in later) >= AGAIN_AFTER_SECONDS
    return long and any(each.fits for each in measurements)
