"""SurrogateSampler: chooses the next Config to measure, behind Optuna's sampler interface.

Until something fits: the fastest config that is likely to fit, or without predictions the one of least memory, since an
early answer beats a late good one. From then on: the largest expected improvement of throughput per second of probing
(Snoek et al. 2012, section 3.2), times the probability that the config is feasible. Configs that are refused, or proven
not to fit by an out-of-memory, are never proposed; a measured one only to see the machine drift. Once no config is
expected to beat the best, the best of each tier is searched for in the same way.

It learns from the study's trials only (the user attribute `measurement`), so a resumed study continues unchanged.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import TIERS, tier
from autofit.search.drift import is_due
from autofit.search.encoding import Mask
from autofit.search.pruning import ruled_out
from autofit.search.surrogate import Surrogate

MEASUREMENT = "measurement"  # the user attribute of a trial that holds Measurement.to_trial()
_READ: weakref.WeakKeyDictionary[Study, dict[int, Measurement]] = weakref.WeakKeyDictionary()

_INFEASIBLE = 1e-3  # configs of a lower probability are not scored while others are left
_PROOFS = 3  # configs out of memory that confirm a prediction that none fits
_DEAREST = 100.0  # no probe costs so many times another's, so a smaller share of the largest gain is not scored
_CHEAP = 2.0  # times the cheapest: until something fits, dearer probes can wait
_LIKELY = 0.7  # probability that suffices for the first probes, of which one that fits says more than one that does not
_SURE = 0.9  # to be feasible: while a config of less is measured, none is proposed that would need more memory


class SurrogateSampler(BaseSampler):
    """Proposes configs of the surrogate's pool; `seed` decides between those of the same score. A config is worth a
    probe if it is expected to beat the best, or with `of_tiers` the best of its tier, by more than a share, its
    `tolerance`; None: any is. `time_left`: seconds; once something fits, no probe is proposed that is expected to take
    longer while others are not."""

    def __init__(
        self,
        surrogate: Surrogate,
        *,
        seed: int = 0,
        tolerance: float | None = None,
        of_tiers: bool = True,
        time_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.surrogate, pool = surrogate, surrogate.pool.configs
        self.distributions: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(each) for knob, each in surrogate.values.items()
        }
        self._index = {config: index for index, config in enumerate(pool)}
        self._open: Mask = np.ones(len(pool), dtype=bool)  # not ruled out; includes measured ones
        self._ruled_by: set[Config] = set()
        self._not_outgrown = surrogate.prior.not_outgrown(surrogate.encoding, surrogate.memory_order)
        self._seed, self._tolerance, self._time_left = seed, tolerance, time_left
        tiers = np.array([tier(config) for config in pool])
        self._tiers: dict[str, Mask] = {name: tiers == name for name in TIERS if of_tiers}
        self._by_params = {tuple(config[knob] for knob in self.distributions): config for config in pool}

    def left(self, measurements: Sequence[Measurement]) -> Mask:
        """Which configs of the pool are neither measured nor proven not to fit. Proofs of earlier searches count once
        something fits: where nothing does, the nearest miss is measured anew."""
        # Numbers below 0 are of expected measurements (`with_running`), which prove nothing.
        failed = {each.config for each in measurements if each.outcome is Outcome.OUT_OF_MEMORY and each.number >= 0}
        for config in failed - self._ruled_by:
            self._open &= ~ruled_out(config, self.surrogate.encoding, self.surrogate.memory_order)
        self._ruled_by |= failed
        left = self._open & self._not_outgrown if any(each.fits for each in measurements) else self._open.copy()
        left[[self._index[each.config] for each in measurements if each.config in self._index]] = False
        return left

    def config(self, params: Mapping[str, Any]) -> Config:
        """The canonical Config of a trial's params."""
        return self._by_params[tuple(params[knob] for knob in self.distributions)]

    def running(self, study: Study) -> list[Config]:
        """The configs that are being measured: of trials that were asked for and have no result yet."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        # The trial that this is asked for has no params yet.
        return [self.config(each.params) for each in trials if len(each.params) == len(self.distributions)]

    def with_running(self, measurements: Sequence[Measurement], running: Sequence[Config]) -> list[Measurement]:
        """The measurements, and the most likely ones of the configs that are being measured. So nothing is proposed
        twice, and what is similar seldom (Ginsbourger et al. 2010, the "kriging believer")."""
        return [*measurements, *(self.surrogate.fantasies(measurements, running) if running else ())]

    def aim(self, measurements: Sequence[Measurement]) -> tuple[Mask, Sequence[Measurement]] | None:
        """Which configs to choose from, and the measurements whose best to beat; None: no config is worth a probe."""
        left = self.left(measurements)
        if not left.any():
            return None
        some_fit = any(measurement.fits for measurement in measurements)
        if not some_fit and self._is_hopeless(measurements, left):
            return None
        if self._tolerance is None or not some_fit or self.surrogate.can_improve(measurements, left, self._tolerance):
            return left, measurements
        for name, of_tier in self._tiers.items():
            within, rivals = left & of_tier, [each for each in measurements if tier(each.config) == name]
            if self.surrogate.can_improve(measurements, within, self._tolerance, rivals):
                return within, rivals
        return None

    def _is_hopeless(self, measurements: Sequence[Measurement], left: Mask) -> bool:
        """Whether nothing is expected to fit, as those that should need least have shown."""
        tried = sum(each.outcome is Outcome.OUT_OF_MEMORY and each.number >= 0 for each in measurements)
        if self._tolerance is None or not self.surrogate.informed or tried < _PROOFS:
            return False
        feasible = self.surrogate.probability_feasible(measurements, self.surrogate.pool)
        return float(feasible[left].max()) < _INFEASIBLE

    def choose(self, measurements: Sequence[Measurement]) -> Config:
        """The config to measure next, now and then the leader again, to see drift; a LookupError where none is left."""
        left, rivals = self.aim(measurements) or (self.left(measurements), measurements)
        if not left.any():
            raise LookupError("every config of the space is measured, refused or proven not to fit")
        leader = self.surrogate.leader(measurements) if is_due(measurements) else None
        if leader is not None:
            return leader.config
        left = self._decided(measurements, left)
        surrogate, pool = self.surrogate, self.surrogate.pool
        feasible = surrogate.probability_feasible(measurements, pool)
        speeds = surrogate.speeds(measurements, pool, rivals)
        if not math.isfinite(speeds.best):
            likely = left & (feasible > _LIKELY)
            if surrogate.informed and likely.any():
                cost = surrogate.cost(measurements, pool)
                cheap = likely & (cost <= _CHEAP * cost[likely].min())
                return pool.configs[int(np.argmax(np.where(cheap, speeds.posterior.mean, -math.inf)))]
            memory = surrogate.memory(measurements, pool).means
            least = memory - np.log(surrogate.works(measurements, pool))
            return pool.configs[int(np.argmin(np.where(left, least, math.inf)))]
        worth = surrogate.worth_the_risk(measurements, left, rivals)
        likely = worth if surrogate.informed and worth.any() else left & (feasible > _INFEASIBLE)
        cost = surrogate.cost(measurements, pool)
        in_time = cost <= self._time_left()
        possible = next(each for each in (likely & in_time, likely, left & in_time, left) if each.any())
        gain = speeds.of(possible).expected_improvement() * feasible[possible]
        near = gain >= min(gain.max(), gain.max() / _DEAREST)  # rounding may make a gain a little less than none
        indices = np.flatnonzero(possible)[near]
        score = gain[near] / cost[indices]
        ties = indices[score == score.max()]
        return pool.configs[int(np.random.default_rng((self._seed % 2**32, len(measurements))).choice(ties))]

    def _decided(self, measurements: Sequence[Measurement], left: Mask) -> Mask:
        """Those left that an out-of-memory of a config being measured would not rule out; all where there is no other.
        So many probes at once differ in more than how far beyond the limit they are. Predictions know better."""
        running = [each.config for each in measurements if each.number < 0]
        if self.surrogate.informed or not running:
            return left
        seen = [each for each in measurements if each.number >= 0]
        feasible = self.surrogate.probability_feasible(seen, self.surrogate.group(running))
        decided = left.copy()
        for config, probability in zip(running, feasible.tolist(), strict=True):
            if probability < _SURE:
                decided &= ~ruled_out(config, self.surrogate.encoding, self.surrogate.memory_order)
        return decided if decided.any() else left

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Optuna asks which parameters are chosen together: all knobs."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Optuna asks for all knobs of the next trial."""
        config = self.choose(self.with_running(measurements_of(study), self.running(study)))
        return {knob: config[knob] for knob in self.distributions}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Optuna asks for a parameter that is no knob; there is none."""
        raise LookupError(f"{param_name} is not a knob of the space this sampler was made for")


def measurements_of(study: Study) -> list[Measurement]:
    """The measurements that a study's trials hold, by number; each is read once, since a finished trial stays as is."""
    read = _READ.setdefault(study, {})
    for each in study.get_trials(deepcopy=False):
        if each.number not in read and each.state != TrialState.RUNNING and MEASUREMENT in each.user_attrs:
            read[each.number] = Measurement.from_trial(each.user_attrs[MEASUREMENT])
    return sorted(read.values(), key=lambda measurement: measurement.number)
