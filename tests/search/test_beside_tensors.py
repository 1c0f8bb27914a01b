"""What a card holds beside tensors, learnt from measurements, and searches that know of it."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement, Outcome, PeakBytes
from autofit.search.beside_tensors import BesideTensors, beside_tensors
from autofit.search.predictions import Predictions
from autofit.search.study import Limits, search
from tests.search.conftest import Formula

CONTEXT, GROWTH = 600 * MIB, 150 * MIB


def seen(
    allocated: int, reserved: int | None, device: int | None, outcome: Outcome = Outcome.FITS
) -> Measurement:
    return Measurement(Config(), outcome, peak_bytes=PeakBytes(allocated, reserved, device))


def test_it_is_the_median_of_what_fits_and_of_what_other_trainings_took() -> None:
    assert beside_tensors([], CONTEXT) == BesideTensors(1.064, CONTEXT + 148 * MIB)
    measured = [
        seen(100, 102, 112),
        seen(100, 102, 114),
        seen(100, 200, 900, Outcome.OUT_OF_MEMORY),
    ]
    assert beside_tensors(measured, CONTEXT) == BesideTensors(1.02, 12)
    assert beside_tensors([seen(100, None, None)], CONTEXT) == beside_tensors([], CONTEXT)


@given(st.floats(1, 1e12), st.floats(1, 1.5), st.floats(0, 1e10))
def test_what_tensors_hold_and_what_they_leave_are_inverse(
    tensors: float, share: float, context: float
) -> None:
    beside = BesideTensors(share, context)
    assert beside.held(tensors) >= tensors
    assert beside.left(beside.held(tensors)) == pytest.approx(tensors, rel=1e-6, abs=1e-4)


class OnACard(Formula):
    """A card that reserves 2 to 11 % more than tensors take, by config, and whose context grows."""

    def held(self, config: Mapping[str, Any]) -> tuple[int, int]:
        reserved = self.memory(config) * random.Random(str(dict(config))).uniform(1.02, 1.11)
        return int(reserved), int(reserved + CONTEXT + GROWTH)

    def fits(self, config: Mapping[str, Any]) -> bool:
        return self.held(config)[1] <= self.budget

    def probe(self, number: int, config: Config, best: float | None = None) -> Measurement:
        found = super().probe(number, config, best)
        peak = PeakBytes(int(self.memory(config)), *self.held(config))
        return dataclasses.replace(found, peak_bytes=peak) if found.fits else found

    def found(self, context_bytes: int | None) -> tuple[int, float]:
        """(probes out of memory, share of the best speed) of a search whose predictions of tensors are exact."""
        self.budget += 2 * GIB
        told = Predictions.of(
            self.configs,
            [*map(self.memory, self.configs)],
            [1 / self.speed(each) for each in self.configs],
        )
        problem = dataclasses.replace(self.problem(), predict=lambda _: told)
        limits = Limits(
            8, memory_bytes=int(self.budget) - CONTEXT, context_bytes=context_bytes, tolerance=0.03
        )
        outcome = search(self.space, problem, limits=limits)
        speeds = [each.throughput for each in outcome.measurements if each.throughput]
        failed = sum(each.outcome is Outcome.OUT_OF_MEMORY for each in outcome.measurements)
        return failed, max(speeds, default=0.0) / self.best()


def test_a_search_that_knows_of_it_runs_out_of_memory_less_and_finds_as_much() -> None:
    told, untold = (
        [OnACard(seed).found(context) for seed in range(24)] for context in (CONTEXT, None)
    )
    assert sum(failed for failed, _ in told) < 0.1 * sum(failed for failed, _ in untold)
    assert sum(speed for _, speed in told) > sum(speed for _, speed in untold) - 0.005 * len(told)
