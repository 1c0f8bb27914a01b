"""SurrogateSampler: chooses the next Config to measure, behind Optuna's ordinary sampler interface.

Two phases. Until something fits, the fastest of those that are expected to fit, where predictions say which those are,
and least memory first where they do not: an answer early beats a good one late. From then on the config with the
largest expected improvement of throughput for each second that its probe should take (Snoek et al. 2012, section 3.2),
times the probability that it fits, times the probability that it works at all. What an out-of-memory proves not to fit
and what is refused is never proposed; what is measured already only to see whether the machine is still as fast as it
was.

Once nothing is expected to beat the best any more, it looks for the best of each tier in the same way.

It learns from the study's trials only (the user attribute `measurement`), so a resumed study goes on as if never
stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autofit.core.config import Config, Value
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import TIERS, tier
from autofit.search.drift import is_due
from autofit.search.encoding import Mask
from autofit.search.pruning import ruled_out
from autofit.search.surrogate import Surrogate

MEASUREMENT = "measurement"  # the user attribute of a trial that holds Measurement.to_trial()

_NO_CHANCE = 1e-3  # to fit: what is below is not worth weighing while anything else is left
_DEAREST = 100.0  # times what another costs: no probe costs more, so what promises less than that share is not weighed
_CHEAP = 2.0  # times the cheapest: until something fits, what costs more can wait
_LIKELY = 0.7  # to fit: enough for the first probes, of which one that fits tells more than one that does not


class SurrogateSampler(BaseSampler):
    """Proposes configs of a pool by what is believed of them, given the measurements so far.

    Args:
        surrogate: about the canonical configs that may be proposed (the refused ones already left out).
        seed: decides between configs that promise the same.
        tolerance: by what share of the best a config must be expected to be faster to be worth a probe; None: any is.
    """

    def __init__(self, surrogate: Surrogate, *, seed: int = 0, tolerance: float | None = None) -> None:
        self.surrogate, pool = surrogate, surrogate.pool.configs
        self.distributions: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(each) for knob, each in surrogate.values.items()
        }
        self._place = {config: place for place, config in enumerate(pool)}
        self._open: Mask = np.ones(len(pool), dtype=bool)  # not yet ruled out; measured ones may be among them
        self._ruled_by: set[Config] = set()
        self._not_outgrown = surrogate.past.not_outgrown(surrogate.columns, surrogate.memory_order)
        self._seed = seed
        self._tolerance = tolerance
        tiers = np.array([tier(config) for config in pool])
        self._tiers: dict[str, Mask] = {name: tiers == name for name in TIERS}
        self._by_params = {tuple(config[knob] for knob in self.distributions): config for config in pool}

    def left(self, measurements: Sequence[Measurement]) -> Mask:
        """Which configs of the pool are neither measured nor proven not to fit.

        What earlier searches proved counts once something fits: where nothing does, the nearest miss is measured anew.
        """
        for measurement in measurements:
            failed = measurement.config if _is_proof(measurement) else None
            if failed and failed not in self._ruled_by:
                self._ruled_by.add(failed)
                self._open &= ~ruled_out(failed, self.surrogate.columns, self.surrogate.memory_order)
        left = self._open & self._not_outgrown if any(each.fits for each in measurements) else self._open.copy()
        left[[self._place[each.config] for each in measurements if each.config in self._place]] = False
        return left

    def candidates(self, measurements: Sequence[Measurement]) -> list[Config]:
        """Those configs, in the order of the pool."""
        return [self.surrogate.pool.configs[place] for place in np.flatnonzero(self.left(measurements)).tolist()]

    def config(self, params: Mapping[str, Any]) -> Config:
        """The canonical Config of a trial's params."""
        return self._by_params[tuple(params[knob] for knob in self.distributions)]

    def running(self, study: Study) -> list[Config]:
        """The configs that are being measured: of a study's trials that are asked for and not told yet."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        whole = [each.params for each in trials if len(each.params) == len(self.distributions)]  # not the one asked for
        return [self.config(params) for params in whole]

    def believed(self, measurements: Sequence[Measurement], running: Sequence[Config]) -> list[Measurement]:
        """The measurements, and of each config that is being measured what its own is expected to be.

        So nothing is proposed twice, and what is much like it only where that tells more (the "kriging believer" of
        Ginsbourger et al. 2010).
        """
        return [*measurements, *(self.surrogate.most_likely(measurements, running) if running else ())]

    def aim(self, measurements: Sequence[Measurement]) -> tuple[Mask, Sequence[Measurement]] | None:
        """Which configs to choose from, and the measurements whose best they are to beat; None: nothing is worth it."""
        left = self.left(measurements)
        if not left.any():
            return None
        if self._tolerance is None or not any(measurement.fits for measurement in measurements):
            return left, measurements
        if self.surrogate.may_beat(measurements, left, self._tolerance):
            return left, measurements
        for name, those in self._tiers.items():
            within, rivals = left & those, [each for each in measurements if tier(each.config) == name]
            if self.surrogate.may_beat(measurements, within, self._tolerance, rivals):
                return within, rivals
        return None

    def choose(self, measurements: Sequence[Measurement]) -> Config:
        """The config to measure next, worth it or not; now and then the leader again, to see the machine drift.

        Raises:
            LookupError: there is none left.
        """
        left, rivals = self.aim(measurements) or (self.left(measurements), measurements)
        if not left.any():
            raise LookupError("every config of the space is measured, refused or proven not to fit")
        leader = self.surrogate.leader(measurements) if is_due(measurements) else None
        if leader is not None:
            return leader.config
        pool = self.surrogate.pool
        chances, speeds = self.surrogate.chances(measurements, pool), self.surrogate.speeds(measurements, pool, rivals)
        if not math.isfinite(speeds.best):
            likely = left & (chances > _LIKELY)
            if self.surrogate.informed and likely.any():
                cost = self.surrogate.cost(measurements, pool)
                cheap = likely & (cost <= _CHEAP * cost[likely].min())
                return pool.configs[int(np.argmax(np.where(cheap, speeds.expected.mean, -math.inf)))]
            memory, _, _ = self.surrogate.memory(measurements, pool)
            least = memory - np.log(self.surrogate.works(measurements, pool))
            return pool.configs[int(np.argmin(np.where(left, least, math.inf)))]
        likely = left & (chances > _NO_CHANCE)
        possible = likely if likely.any() else left
        worth = speeds.of(possible).improvement() * chances[possible]
        near = worth >= min(worth.max(), worth.max() / _DEAREST)  # no improvement may be a little less than none
        places = np.flatnonzero(possible)[near]
        score = worth[near] / self.surrogate.cost(measurements, pool, places)
        ties = places[score == score.max()]
        return pool.configs[int(np.random.default_rng((self._seed % 2**32, len(measurements))).choice(ties))]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Optuna asks which parameters are chosen together: all knobs."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Optuna asks for all knobs of the next trial."""
        return self._params(self.choose(self.believed(measurements_of(study), self.running(study))))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Optuna asks for a parameter that is no knob; there is none."""
        raise LookupError(f"{param_name} is not a knob of the space this sampler was made for")

    def _params(self, config: Config) -> dict[str, Value]:
        return {knob: config[knob] for knob in self.distributions}


def _is_proof(measurement: Measurement) -> bool:
    """Whether others that need as much cannot fit; what is only expected (`believed`) proves nothing."""
    return measurement.outcome is Outcome.OUT_OF_MEMORY and measurement.number >= 0


def measurements_of(study: Study) -> list[Measurement]:
    """The measurements that a study's trials hold, by number."""
    held = [
        Measurement.from_trial(trial.user_attrs[MEASUREMENT])
        for trial in study.get_trials(deepcopy=False)
        if trial.state != TrialState.RUNNING and MEASUREMENT in trial.user_attrs
    ]
    return sorted(held, key=lambda measurement: measurement.number)
