"""Probes side by side: as many as there are workers, each config once, and nothing left behind however it ends."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.measurement import Measurement
from autofit.search import study as study_module
from autofit.search.concurrency import Concurrency, Probe, Threaded
from autofit.search.journal import Journal
from autofit.search.predictions import Predictions
from autofit.search.ranking import fastest
from autofit.search.study import Limits, SearchOutcome, search

WORKERS = 3
PATIENCE = 60.0  # seconds, far beyond what anything here takes


class Held:
    """Probes that finish in the order that `recommend` says, without a thread."""

    def __init__(
        self, probe: Probe, places: int, recommend: Callable[[int], int] = lambda running: 0
    ) -> None:
        self.places, self._probe, self._pick = places, probe, recommend
        self.running: list[tuple[int, Config, float | None]] = []
        self.most = 0

    def submit(self, number: int, config: Config, best_seconds: float | None) -> None:
        self.running.append((number, config, best_seconds))
        self.most = max(self.most, len(self.running))

    def wait(self) -> tuple[int, Measurement]:
        ended = self.running.pop(self._pick(len(self.running)))
        return ended[0], self._probe(*ended)

    def shutdown(self) -> list[tuple[int, Measurement]]:
        return []


class SideBySide:
    """A search of a formula in threads, in which every probe waits for as many others as there are workers."""

    def __init__(self, problem: Any, size: int = WORKERS) -> None:
        self.problem, self.size = problem, size
        self.meeting = threading.Barrier(size)
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.alive = self.most = 0
        self.probes: Threaded | None = None
        self.on_finished: Callable[[Measurement, Measurement | None], None] = (
            lambda measurement, best: None
        )
        self.meet: Callable[[int], object] = lambda number: self.meeting.wait(PATIENCE)

    def probe(self, number: int, config: Config, best: float | None) -> Measurement:
        with self.lock:
            self.alive += 1
            self.most = max(self.most, self.alive)
        try:
            self.meet(number)
            measured: Measurement = self.problem.probe(number, config, best)
            return measured
        finally:
            with self.lock:
                self.alive -= 1

    def stop(self) -> None:
        self.stopped.set()

    def until_stopped(self) -> None:
        """What a probe does whose process is ended by somebody else."""
        assert self.stopped.wait(PATIENCE)
        raise ProbeError("the process that starts probes ended.")

    def concurrently(self, probe: Probe) -> Concurrency:
        self.probes = Threaded(probe, lambda: self.size, self.stop)
        return self.probes

    def search(self, trials: int, **options: Any) -> SearchOutcome:
        problem = dataclasses.replace(
            self.problem.problem(),
            probe=self.probe,
            concurrency=self.concurrently,
            on_finished=lambda *told: self.on_finished(*told),
        )
        limits = Limits(trials=trials, memory_bytes=int(self.problem.budget))
        return search(self.problem.space, problem, limits=limits, **options)


@pytest.fixture
def side_by_side(formula: Any) -> Iterator[SideBySide]:
    made = SideBySide(formula(3))
    yield made
    assert made.alive == 0  # no thread of a search outlives it


def held(
    problem: Any,
    size: int,
    trials: int,
    recommend: Callable[[int], int] = lambda running: 0,
    **options: Any,
) -> Any:
    """(outcome, probes) of a search whose probes end in the order said."""
    started: list[Held] = []

    def concurrently(probe: Probe) -> Concurrency:
        started.append(Held(probe, size, recommend))
        return started[0]

    limits = Limits(trials=trials, memory_bytes=int(problem.budget))
    asked = dataclasses.replace(problem.problem(), concurrency=concurrently, **options)
    return search(problem.space, asked, limits=limits), started[0]


def test_as_many_at_a_time_as_there_are_workers_and_each_config_once(
    side_by_side: SideBySide,
) -> None:
    # the barrier: with fewer at a time it would never end
    outcome = side_by_side.search(5 * WORKERS)
    assert side_by_side.most == WORKERS
    assert outcome.stopped_by == "trials"
    assert [each.number for each in outcome.measurements] == list(range(5 * WORKERS))
    assert len(set(side_by_side.problem.probed)) == len(side_by_side.problem.probed) == 5 * WORKERS
    assert not side_by_side.stopped.is_set()  # nothing was left to stop


def test_without_predictions_trials_are_left_to_learn_from_others(formula: Any) -> None:
    """However many workers there are; with predictions all of them measure at once."""
    problem = formula(3)
    assert held(problem, 40, 20)[1].most == 5
    seconds = [32 / problem.speed(config) for config in problem.configs]
    told = Predictions.of(
        problem.configs, [problem.memory(config) for config in problem.configs], seconds
    )
    assert held(problem, 40, 20, predict=lambda configs: told)[1].most == 20


def test_a_number_of_trials_that_the_workers_do_not_divide_is_kept(
    side_by_side: SideBySide,
) -> None:
    side_by_side.meet = lambda number: None
    for trials in (1, WORKERS - 1, WORKERS + 1):
        side_by_side.problem.probed.clear()
        assert len(side_by_side.search(trials).measurements) == trials
        assert len(side_by_side.problem.probed) == trials


@pytest.mark.parametrize(
    "recommend", [lambda running: 0, lambda running: running - 1, lambda running: running // 2]
)
@pytest.mark.parametrize("size", [2, 4])
def test_whichever_ends_first_numbers_are_of_the_order_of_starting(
    formula: Any, size: int, recommend: Callable[[int], int]
) -> None:
    outcome, probes = held(formula(2), size, 21, recommend)
    assert probes.most == size
    assert [each.number for each in outcome.measurements] == list(range(21))
    again, _ = held(formula(2), size, 21, recommend)
    assert again == outcome


def test_one_place_is_the_search_as_it_is_by_default(formula: Any) -> None:
    problem, plain = formula(4), formula(4)
    outcome, _ = held(problem, 1, 20)
    limits = Limits(trials=20, memory_bytes=int(plain.budget))
    assert outcome == search(plain.space, plain.problem(), limits=limits)
    assert (problem.probed, problem.bests) == (plain.probed, plain.bests)


@pytest.mark.parametrize("size", [2, 4])
def test_several_workers_find_what_one_finds(formula: Any, size: int) -> None:
    regrets = []
    for seed in range(12):
        problem = formula(seed, share=(0.1, 0.2, 0.4, 0.8)[seed % 4], noise=0.02)
        best = fastest(held(problem, size, 16)[0].measurements)
        assert best is not None
        regrets.append(1 - problem.speed(best.config) / problem.best())
    assert sum(regrets) / len(regrets) < 0.05


def test_what_is_left_to_the_last_is_measured_once_by_all(formula: Any) -> None:
    problem = formula(4, share=0.2)
    knobs = {
        **problem.space.knobs,
        "lora_rank": (8,),
        "attention": ("sdpa",),
        "precision": ("bf16",),
    }
    problem.space = dataclasses.replace(problem.space, knobs=knobs)
    problem.configs = problem.space.configs(problem.problem().constraints)
    outcome, _ = held(problem, 5, 1000, lambda running: running - 1)
    assert outcome.stopped_by == "space"
    assert len(set(problem.probed)) == len(problem.probed)
    assert len(outcome.measurements) + outcome.skipped["dominated"] == len(problem.configs)


def test_with_predictions_it_ends_by_itself_and_nothing_is_begun_that_what_runs_may_make_needless(
    formula: Any,
) -> None:
    problem = formula(3, noise=0.02)
    seconds = [1.1 * 32 / problem.speed(config) for config in problem.configs]
    told = Predictions.of(
        problem.configs, [problem.memory(config) for config in problem.configs], seconds
    )
    started: list[Held] = []

    def concurrently(probe: Probe) -> Concurrency:
        started.append(Held(probe, 4))
        return started[0]

    asked = dataclasses.replace(
        problem.problem(), concurrency=concurrently, predict=lambda configs: told
    )
    limits = Limits(trials=100, memory_bytes=int(problem.budget), tolerance=0.1)
    outcome = search(problem.space, asked, limits=limits)
    assert outcome.stopped_by == "bound"
    assert len(outcome.measurements) < 20
    best = fastest(outcome.measurements)
    assert best is not None
    assert problem.speed(best.config) > problem.best() / 1.1
    assert not started[0].running


def test_the_time_limit_lets_what_runs_come_to_its_end(
    formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, now = formula(), [100.0]
    monkeypatch.setattr(study_module.time, "monotonic", lambda: now[0])

    def tick(number: int, config: Config) -> None:
        now[0] += 10

    problem.before = tick
    started: list[Held] = []

    def concurrently(probe: Probe) -> Concurrency:
        started.append(Held(probe, 3))
        return started[0]

    limits = Limits(trials=100, time_limit=35)
    outcome = search(
        problem.space,
        dataclasses.replace(problem.problem(), concurrency=concurrently),
        limits=limits,
    )
    assert outcome.stopped_by == "time"
    # begun before the limit: three at once, one more as each of these ended
    assert len(outcome.measurements) == 3 + 3


def test_all_that_the_search_says_it_says_in_its_own_thread(side_by_side: SideBySide) -> None:
    threads: set[int] = set()
    begun: list[int] = []

    def on_probe(number: int, config: Config) -> None:
        threads.add(threading.get_ident())
        begun.append(number)

    side_by_side.on_finished = lambda measurement, best: threads.add(threading.get_ident())
    problem = dataclasses.replace(side_by_side.problem.problem(), on_probe=on_probe)
    side_by_side.problem.problem = lambda: problem
    side_by_side.search(2 * WORKERS)
    assert threads == {threading.get_ident()}
    assert begun == list(range(2 * WORKERS))


def test_an_interrupt_stops_what_runs_keeps_what_was_measured_and_is_resumed(
    tmp_path: Path, side_by_side: SideBySide
) -> None:
    journal, problem = Journal(tmp_path / "journal.log"), side_by_side.problem
    side_by_side.meet = lambda number: side_by_side.until_stopped() if number in (2, 4) else None

    def interrupt(measurement: Measurement, best: Measurement | None) -> None:
        if measurement.number == 5:
            raise KeyboardInterrupt

    side_by_side.on_finished = interrupt
    first = side_by_side.search(12, journal=journal)
    assert first.stopped_by == "interrupt"
    assert side_by_side.stopped.is_set()
    assert [each.number for each in first.measurements] == [0, 1, 3, 5]

    side_by_side.meet = lambda number: None
    side_by_side.on_finished = lambda measurement, best: None
    second = side_by_side.search(12, journal=journal)
    assert second.stopped_by == "trials"
    assert [each.number for each in second.measurements] == list(range(12))
    assert set(first.measurements) <= set(second.measurements)
    assert len(set(problem.probed)) == len(problem.probed) == 12


def test_an_interrupt_of_a_probe_ends_the_search_too(side_by_side: SideBySide) -> None:
    told = threading.Semaphore(0)
    side_by_side.on_finished = lambda measurement, best: told.release()

    def meet(number: int) -> None:
        if number == 3:
            assert all(told.acquire(timeout=PATIENCE) for _ in range(WORKERS))
            raise KeyboardInterrupt
        if number > 3:
            side_by_side.until_stopped()

    side_by_side.meet = meet
    outcome = side_by_side.search(12)
    assert outcome.stopped_by == "interrupt"
    assert [each.number for each in outcome.measurements] == [0, 1, 2]


def test_what_had_come_to_its_end_when_another_was_interrupted_is_kept(
    side_by_side: SideBySide,
) -> None:
    def interrupt(measurement: Measurement, best: Measurement | None) -> None:
        assert side_by_side.probes
        concurrent.futures.wait(side_by_side.probes._running, timeout=PATIENCE)
        raise KeyboardInterrupt

    side_by_side.on_finished = interrupt
    assert len(side_by_side.search(12).measurements) == WORKERS


@pytest.mark.parametrize(
    "error", [ProbeError("the child processes do not start."), InputError("the loss is wrong.")]
)
def test_an_error_of_one_probe_ends_the_others_and_the_journal_stays_good(
    tmp_path: Path, side_by_side: SideBySide, error: Exception
) -> None:
    journal = Journal(tmp_path / "journal.log")

    def meet(number: int) -> None:
        if number == 4:
            raise error
        if number > 4 or number == 3:
            side_by_side.until_stopped()

    side_by_side.meet = meet
    with pytest.raises(type(error), match=str(error)):
        side_by_side.search(12, journal=journal)
    assert side_by_side.stopped.is_set()
    side_by_side.meet = lambda number: None
    assert len(side_by_side.search(6, journal=journal).measurements) == 6
