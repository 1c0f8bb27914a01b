"""What a search at its defaults hands out, tier by tier, with recorded tables for the truth."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from autofit.core.config import Config
from autofit.core.measurement import Measurement
from autofit.core.options import SearchOptions
from autofit.core.result import tier
from autofit.tuning.context import ranking_for
from benchmarks.memory_models import TIER_MODELS
from benchmarks.rank_tables import TABLES
from benchmarks.record_table import Table
from benchmarks.replay import RecordedTruth
from benchmarks.replay_samplers import ALL, Problem, Replay, handed_out, replay

RANKING = ranking_for(SearchOptions())
NOISE = 0.05  # of the median of a config's few probes
CLOSE = (1 + RANKING.tolerance) * (1 + NOISE)
SEEDS = range(2)
# The models that are a case in one budget, which is their last one.
CASES = [name for name, model in TIER_MODELS.items() if model.budget_gib]


@pytest.fixture(scope="module", params=TIER_MODELS)
def truth(request: pytest.FixtureRequest) -> RecordedTruth:
    """A table, with the predictions of the day on which it was recorded."""
    return RecordedTruth.of(Table.read(TABLES / f"{request.param}.json"), recorded=True)


of_cases = pytest.mark.parametrize("truth", CASES, indirect=True)


@dataclass(frozen=True)
class Disturbed(Problem):
    """Of each tier the first probe takes 1.5 times as long as it should."""

    tiers: set[str] = field(default_factory=set)

    def measure(
        self, config: Config, number: int, chance: Random, *, again: bool = False
    ) -> Measurement:
        measurement = super().measure(config, number, chance, again=again)
        steps = measurement.step_seconds
        if steps is None or tier(config) in self.tiers:
            return measurement

        self.tiers.add(tier(config))
        return measurement.taking(1.5 * steps.median)


def _runs(truth: RecordedTruth, budget: int, kind: type[Problem] = Problem) -> list[Replay]:
    """Searches at the defaults."""
    runs = []
    for seed in SEEDS:
        problem = kind(**{**vars(truth.problem(budget)), "ranking": RANKING})
        runs.append(replay("autofit", problem, seed, SearchOptions().trials))

    return runs


def test_every_tier_that_fits_is_answered_after_two_good_probes_of_it(
    truth: RecordedTruth,
) -> None:
    for budget in truth.budgets():
        for run in _runs(truth, budget):
            rows = run.problem.rows.items()
            fitting = Counter(tier(config) for config, row in rows if run.problem.fits(row))
            good = Counter(tier(measurement.config) for measurement in run.seen if measurement.fits)
            assert set(handed_out(run, None)) == {ALL, *fitting}
            for name, count in fitting.items():
                assert good[name] >= min(2, count)


@of_cases
def test_of_the_cases_the_answer_is_the_faithful_one_since_speed_does_not_pay(
    truth: RecordedTruth,
) -> None:
    for run in _runs(truth, truth.budgets()[-1]):
        best = handed_out(run, None)[ALL]
        assert tier(best) == "full"
        assert RANKING.objective.discount(best) == 1.0
        assert run.problem.best <= CLOSE * run.problem.merit(best)
        assert len(run.seen) <= 12


@of_cases
def test_no_tier_of_the_cases_is_named_by_one_bad_probe(truth: RecordedTruth) -> None:
    for run in _runs(truth, truth.budgets()[-1], Disturbed):
        answers = handed_out(run, None)
        assert tier(answers[ALL]) == "full"
        for name, most in run.problem.best_of_tiers.items():
            merit = run.problem.merit(answers[name])
            # Nowhere near what the first probe said, of the best even less.
            assert most <= 1.25 * merit
            if name == "full":
                assert most <= CLOSE * merit
