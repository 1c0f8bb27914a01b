"""SurrogateSampler: chooses the next Config to measure, behind Optuna's sampler interface.

Until something fits: the fastest config that is likely to fit, or without predictions the one of
least memory, since an early answer beats a late good one. From then on: the largest expected
improvement of throughput for what its probe costs (Snoek et al. 2012, section 3.2), times the
probability that the config is feasible. A few configs of each tier come before any tier is
polished, and relatives (`Knob.relative`) count as one. Configs that are refused, or proven not to fit by an
out-of-memory, are never proposed; a measured one only to see the machine drift. Once no config is
expected to beat the best, the best of each tier is searched for in the same way.

It learns from the study's trials only (the user attribute `measurement`), so a resumed study
continues unchanged.
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
from autofit.core.knobs import knob_named
from autofit.core.measurement import Measurement, Outcome, that_fit
from autofit.core.result import TIERS, of_tier, tier
from autofit.search.costs import cheapest
from autofit.search.drift import is_due
from autofit.search.encoding import Configs, KnobValues, Mask
from autofit.search.ranking import BY_SPEED, Figures, Measurements, Ranking
from autofit.search.surrogate import Merits, Surrogate

MEASUREMENT = "measurement"  # the user attribute of a trial that holds Measurement.to_trial()
_READ: weakref.WeakKeyDictionary[Study, dict[int, Measurement]] = weakref.WeakKeyDictionary()

_INFEASIBLE = 1e-3  # configs of a lower probability are not scored while others are left
_PROOFS = 3  # configs out of memory that confirm a prediction that none fits
# No probe costs so many times another's: a smaller share of the largest gain is not scored.
_DEAREST = 100.0
# The larger, the more a dear probe must promise to come first. A probe that would be made in any case
# is better made soon: on the recorded tables 1, 1/2 and 1/3 found the same; replayed on what an H200
# showed (benchmarks.gpu), where compiling makes a probe three times as dear, 1 came within 3 % after
# 185 s of probes and 1/3 after 105 s.
_THRIFT = 1 / 3
_DEAR = 2.0  # times the cheapest probe: another one is not made on suspicion
_CHEAP = 2.0  # times the cheapest: until something fits, dearer probes can wait
# A probability that suffices for the first probes, of which one that fits says more than one that
# does not.
_LIKELY = 0.7
# The share of the tolerance that an expected improvement must be above. On the recorded tables 2 / 3
# missed 10 % of the speed of one, and 1 / 2 nothing.
_SMALL = 0.5
# A search that polishes no tier looks for what is expected to be so much better before it looks at
# every tier.
_MUCH_BETTER = 0.15
_MOST_FAILED = 2  # probes of a tier that do not fit, before the search looks elsewhere
# While a config of a lower probability is measured, none is proposed that would need more memory.
_SURE = 0.9


class SurrogateSampler(BaseSampler):
    """Proposes configs of the surrogate's pool.

    Args:
        seed: decides between configs of the same score.
        tolerance: a config is worth a probe if it is expected to beat the best by more than this
            share; None: any config is.
        ranking: which config is recommended.
        of_each_tier: configs that fit to measure of each tier before any is polished.
        between: by knob the values beside those of the pool that other pools of the same search
            may have.
        polishes_tiers: whether a config is worth a probe that may beat the best of its tier alone.
        time_left: in seconds; once something fits, no probe is proposed that is expected to take
            longer while others are not.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        *,
        seed: int = 0,
        between: KnobValues | None = None,
        tolerance: float | None = None,
        ranking: Ranking = BY_SPEED,
        of_each_tier: int = 0,
        polishes_tiers: bool = True,
        time_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.surrogate = surrogate
        self._seed = seed
        self._tolerance = tolerance
        self._time_left = time_left
        self.distributions: dict[str, BaseDistribution] = {}
        for knob, values in surrogate.values.items():
            others = (between or {}).get(knob, ())
            always = [value for value in values if value not in others]
            self.distributions[knob] = CategoricalDistribution((*always, *others))

        pool = surrogate.pool.configs
        self._index = {}
        self._by_params = {}
        for index, config in enumerate(pool):
            self._index[config] = index
            self._by_params[self._params(config)] = config

        self._open: Mask = np.ones(len(pool), dtype=bool)  # not ruled out; includes measured ones
        self._ruled_by: set[Config] = set()
        prior = surrogate.prior
        self._not_outgrown = prior.not_outgrown(surrogate.encoding, surrogate.memory_order)
        self._ranking = ranking
        self._of_each_tier = of_each_tier
        self._polishes_tiers = polishes_tiers
        tiers = np.array(list(map(tier, pool)))
        self._tiers = {name: tiers == name for name in TIERS}
        # Configs that differ in no more than relatives of the same values have the same number.
        self._twins = surrogate.encoding.classes(
            lambda knob, value: knob_named(knob).relative(value)
        )

    def left(self, measurements: Measurements) -> Mask:
        """Which configs of the pool are neither measured nor proven not to fit.

        Proofs of earlier searches count once something fits: where nothing does, the nearest miss
        is measured anew.
        """
        left = self._open  # `&=` below changes it in place
        for measurement in measurements:
            config = measurement.config
            if _ran_out_of_memory(measurement) and config not in self._ruled_by:
                left &= ~self.surrogate.ruled_out_by(config)
                self._ruled_by.add(config)

        left = left.copy()
        for measurement in measurements:
            index = self._index.get(measurement.config)
            if index is not None:
                left[index] = False

        if that_fit(measurements):
            left &= self._not_outgrown
        return left

    def config(self, params: Mapping[str, Any]) -> Config:
        """The canonical Config of a trial's params."""
        return self._by_params[self._params(params)]

    def _params(self, config: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of all knobs that are searched, in the order of the distributions."""
        return tuple(config[knob] for knob in self.distributions)

    def running(self, study: Study) -> list[Config]:
        """The configs that are being measured, of trials that have no result yet."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        # The trial that a config is being asked for has no params yet.
        begun = [trial.params for trial in trials if len(trial.params) == len(self.distributions)]
        return list(map(self.config, begun))

    def with_running(
        self,
        measurements: Measurements,
        running: Configs,
    ) -> list[Measurement]:
        """The measurements, and the most likely ones of the configs that are being measured.

        So nothing is proposed twice, and what is similar seldom (Ginsbourger et al. 2010, the
        "kriging believer").
        """
        if not running:
            return list(measurements)
        return [*measurements, *self.surrogate.fantasies(measurements, running)]

    def acquisition_target(self, measurements: Measurements) -> tuple[Mask, Measurements] | None:
        """Which configs to choose from, and the measurements whose best to beat.

        Once something fits: in a search that polishes no tier all configs left, while one is
        expected to be much better; the tier of which least was seen, if too little; all configs
        left as long as one may beat the best of all; those of the first tier in which one may beat
        the tier's best; and the relatives of the leader that would be recommended in its place.
        Before these a config whose one probe may have been disturbed. None where no config is worth
        a probe.
        """
        left = self.left(measurements)
        if not left.any():
            return None

        tolerance = self._tolerance
        if not that_fit(measurements):
            is_hopeless = tolerance is not None and self._is_hopeless(measurements, left)
            return None if is_hopeless else (left, measurements)

        few = self.little_seen(measurements)
        is_hasty = not self._polishes_tiers and self.expects_much_better(measurements)
        if few and not is_hasty:
            fewest = [name for name, good in few.items() if good == min(few.values())]
            return self._new_and_rivals(measurements, self._most_promising(measurements, fewest))

        if tolerance is None:
            new = self._without_twins(measurements, left)
            is_worth_it = self.surrogate.probe_candidates(measurements, new).any()
            return (new if is_worth_it else left), measurements

        names: tuple[str | None, ...] = (None,)
        if self._polishes_tiers:
            names = (None, *TIERS)
            doubtful = self.surrogate.doubtful(measurements, tolerance)
            if doubtful in self._index:
                return self._only(self._index[doubtful]), measurements

        for name in names:
            if self._goes_on(measurements, name, tolerance):
                return self._new_and_rivals(measurements, name)

        return self._twins_to_prefer(measurements, left)

    def _goes_on(self, measurements: Measurements, name: str | None, tolerance: float) -> bool:
        """Whether another probe is worth it in a tier, None for all of them.

        A config must be able to beat the rivals by more than the tolerance, at 95 %. And the
        improvement to expect of the best proposal must not be small, now or before the last
        measurement: the first small one may be by chance, which is looked into where probes are
        cheap.
        """
        least = _SMALL * tolerance
        new, rivals = self._new_and_rivals(measurements, name)
        if not new.any() or not self.surrogate.can_improve(measurements, new, tolerance, rivals):
            return False
        if self.surrogate.expected_gain(measurements, new, rivals) > least:
            return True

        if measurements[-1].seconds > _DEAR * cheapest(measurements):
            return False

        before = measurements[:-1]
        new, rivals = self._new_and_rivals(before, name)
        return self.surrogate.expected_gain(before, new, rivals) > least

    def _new_and_rivals(
        self,
        measurements: Measurements,
        name: str | None,
    ) -> tuple[Mask, Measurements]:
        """The configs of a tier that are new, None for all of them, and the measurements of it."""
        new = self._without_twins(measurements, self.left(measurements))
        if name is None:
            return new, measurements

        return new & self._tiers[name], of_tier(name, measurements)

    def little_seen(self, measurements: Measurements) -> dict[str, int]:
        """How many probes fit of each tier of which too few do, though others are likely to.

        Where earlier searches know configs of a tier that fit, one suffices.
        """
        if not self._of_each_tier:
            return {}

        feasible = self.surrogate.probability_feasible(measurements, self.surrogate.pool)
        few = {}
        for name in TIERS:
            new, rivals = self._new_and_rivals(measurements, name)
            is_known = any(tier(config) == name for config in self.surrogate.prior.fits)
            enough = 1 if is_known else self._of_each_tier
            good = len(that_fit(rivals))
            refused = sum(seen.outcome is Outcome.REFUSED for seen in rivals)
            failed = len(rivals) - good - refused
            is_likely = (feasible[new] > _LIKELY).any()
            if good < enough and failed <= _MOST_FAILED and is_likely:
                few[name] = good

        return few

    def expects_much_better(self, measurements: Measurements) -> bool:
        """Whether a config left is expected to be much better than the best."""
        left = self.left(measurements)
        return self.surrogate.expects_better(measurements, left, _MUCH_BETTER)

    def _most_promising(self, measurements: Measurements, names: Sequence[str]) -> str:
        """The one of some tiers of which the best config left is expected to be the best."""

        def promise(name: str) -> float:
            new, _ = self._new_and_rivals(measurements, name)
            candidates = self.surrogate.probe_candidates(measurements, new)
            merits = self.surrogate.merits(measurements, self.surrogate.pool)
            return float(merits.posterior.mean[candidates].max(initial=-math.inf))

        return max(names, key=promise)

    def _without_twins(self, measurements: Measurements, left: Mask) -> Mask:
        """Those left of which no relative was measured to fit, and of relatives that are likely to
        fit only the one that is expected to be best.

        Without predictions nothing tells relatives apart, so that all are new.
        """
        surrogate = self.surrogate
        if not surrogate.predicts:
            return left

        measured = [seen.config for seen in that_fit(measurements)]
        known = [self._index[config] for config in measured if config in self._index]
        new = left & ~np.isin(self._twins, self._twins[known])

        feasible = surrogate.probability_feasible(measurements, surrogate.pool)
        merits = surrogate.merits(measurements, surrogate.pool).posterior.mean
        likely = np.flatnonzero(new & (feasible > _LIKELY))
        best_last = likely[np.argsort(merits[likely], kind="stable")]
        best_of_twins = dict(zip(self._twins[best_last].tolist(), best_last.tolist(), strict=True))

        new &= ~np.isin(self._twins, list(best_of_twins))
        new[list(best_of_twins.values())] = True
        return new

    def _twins_to_prefer(
        self,
        measurements: Measurements,
        left: Mask,
    ) -> tuple[Mask, Measurements] | None:
        """The relative of the leader that would be recommended of all of them, by what is expected;
        None where it was measured."""
        surrogate = self.surrogate
        leader = surrogate.leader(measurements)
        if leader is None or not surrogate.predicts:
            return None

        feasible = surrogate.probability_feasible(measurements, surrogate.pool)
        possible = left & (feasible > _LIKELY)
        known = [self._index[seen.config] for seen in that_fit(measurements)]
        possible[known] = True
        twins = self._twins == self._twins[self._index[leader.config]]
        indices = np.flatnonzero(possible & twins).tolist()

        merits = surrogate.merits(measurements, surrogate.pool).posterior.mean
        nbytes = surrogate.memory.sizes(measurements, surrogate.pool).means
        figures = []
        for index in indices:
            config = surrogate.pool.configs[index]
            figures.append(Figures(config, math.exp(merits[index]), nbytes[index]))

        preferred = self._ranking.preferred(figures)
        if preferred is None or indices[preferred] in known:
            return None

        return self._only(indices[preferred]), measurements

    def _only(self, index: int) -> Mask:
        """One config of the pool."""
        chosen = np.zeros(len(self._index), dtype=bool)
        chosen[index] = True
        return chosen

    def _is_hopeless(self, measurements: Measurements, left: Mask) -> bool:
        """Whether nothing is expected to fit, as those that should need least have shown."""
        failed = sum(map(_ran_out_of_memory, measurements))
        if not self.surrogate.informed or failed < _PROOFS:
            return False

        feasible = self.surrogate.probability_feasible(measurements, self.surrogate.pool)
        return float(feasible[left].max()) < _INFEASIBLE

    def choose(self, measurements: Measurements) -> Config:
        """The config to measure next, now and then the leader again, to see drift.

        Raises LookupError where none is left.
        """
        target = self.acquisition_target(measurements)
        left, rivals = target or (self.left(measurements), measurements)
        if not left.any():
            raise LookupError("every config of the space is measured, refused or proven not to fit")

        if is_due(measurements):
            leader = self.surrogate.leader(measurements)
            if leader is not None:
                return leader.config

        left = self._independent(measurements, left)
        pool = self.surrogate.pool
        merits = self.surrogate.merits(measurements, pool, rivals)
        if math.isfinite(merits.best):
            candidates = self.surrogate.probe_candidates(measurements, left, rivals)
            index = self._most_gain_per_second(measurements, left, candidates, merits)
        else:
            index = self._likely_to_fit(measurements, left, merits)

        return pool.configs[index]

    def _independent(self, measurements: Measurements, left: Mask) -> Mask:
        """Those left that an out-of-memory of a config being measured would not rule out; all
        where there is no other.

        So many probes at once differ in more than how far beyond the limit they are. Predictions
        know better.
        """
        finished = []
        running = []
        for measurement in measurements:
            if measurement.number >= 0:
                finished.append(measurement)
            else:
                running.append(measurement.config)
        if self.surrogate.informed or not running:
            return left

        group = self.surrogate.group(running)
        feasible = self.surrogate.probability_feasible(finished, group)
        independent = left.copy()
        for config, probability in zip(running, feasible.tolist(), strict=True):
            if probability < _SURE:
                independent &= ~self.surrogate.ruled_out_by(config)

        return independent if independent.any() else left

    def _likely_to_fit(
        self,
        measurements: Measurements,
        left: Mask,
        merits: Merits,
    ) -> int:
        """The fastest of those likely to fit whose probes are cheap; else the smallest config.

        A search that polishes no tier begins with a dear probe that it would make next anyway, of
        what is expected to be much better.
        """
        surrogate = self.surrogate
        feasible = surrogate.probability_feasible(measurements, surrogate.pool)
        likely = left & (feasible > _LIKELY)
        if surrogate.informed and likely.any():
            cost = surrogate.cost(measurements)
            cheap = likely & (cost <= _CHEAP * cost[likely].min())
            first = int(np.argmax(np.where(cheap, merits.posterior.mean, -math.inf)))
            if self._polishes_tiers or that_fit(measurements):
                return first

            best = int(np.argmax(np.where(likely, merits.posterior.mean, -math.inf)))
            gain = merits.posterior.mean[best] - merits.posterior.mean[first]
            return best if gain > math.log1p(_MUCH_BETTER) else first

        sizes = surrogate.memory.sizes(measurements, surrogate.pool)
        works = surrogate.works(measurements, surrogate.pool)
        nbytes = sizes.means - np.log(works)
        return int(np.argmin(np.where(left, nbytes, math.inf)))

    def _most_gain_per_second(
        self,
        measurements: Measurements,
        left: Mask,
        candidates: Mask,
        merits: Merits,
    ) -> int:
        """The config with the largest expected improvement for what its probe costs."""
        surrogate = self.surrogate
        feasible = surrogate.probability_feasible(measurements, surrogate.pool)
        likely = left & (feasible > _INFEASIBLE)
        if surrogate.informed and candidates.any():
            likely = candidates

        cost = surrogate.cost(measurements)
        in_time = cost <= self._time_left()
        choices = (likely & in_time, likely, left & in_time, left)
        possible = next(mask for mask in choices if mask.any())

        # Costs are looked at only where the gain may still win.
        gain = merits.of(possible).expected_improvement() * feasible[possible]
        # Rounding may make a gain a little less than none.
        near = gain >= min(gain.max(), gain.max() / _DEAREST)
        indices = np.flatnonzero(possible)[near]
        score = gain[near] / cost[indices] ** _THRIFT
        ties = indices[score == score.max()]

        seed = self._seed % 2**32
        draw = np.random.default_rng((seed, len(measurements)))
        return int(draw.choice(ties))

    def infer_relative_search_space(
        self,
        study: Study,
        trial: FrozenTrial,
    ) -> dict[str, BaseDistribution]:
        """Optuna asks which parameters are chosen together: all knobs."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Optuna asks for all knobs of the next trial."""
        measurements = self.with_running(measurements_of(study), self.running(study))
        config = self.choose(measurements)
        return {knob: config[knob] for knob in self.distributions}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Optuna asks for a parameter that is no knob; there is none."""
        raise LookupError(f"{param_name} is not a knob of the space this sampler was made for")


def _ran_out_of_memory(measurement: Measurement) -> bool:
    """Whether it really did: numbers below 0 are of expected measurements, which prove nothing."""
    return measurement.outcome is Outcome.OUT_OF_MEMORY and measurement.number >= 0


def measurements_of(study: Study) -> list[Measurement]:
    """The measurements that a study's trials hold, by number.

    Each is read once, since a finished trial stays as it is.
    """
    read = _READ.setdefault(study, {})
    for trial in study.get_trials(deepcopy=False):
        if trial.number in read or trial.state == TrialState.RUNNING:
            continue
        if MEASUREMENT in trial.user_attrs:
            read[trial.number] = Measurement.from_trial(trial.user_attrs[MEASUREMENT])

    return sorted(read.values(), key=lambda measurement: measurement.number)
