"""When a search ends, what an interrupt leaves of it, and how it is resumed. Probes are a formula here."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event, Note
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import search_options
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.probe import Request
from autofit.tuning import measured as tune
from autofit.tuning import pipeline
from tests import tiny
from tests.tuning.searching import CARD, Bench, by_micro_batch, missed, verifies

# Limits, interrupts, resuming


def test_trials_are_a_limit(bench: Bench) -> None:
    result = bench.search(trials=2)
    assert len(bench.executor.explored) == len(result.trials) == 2
    assert result.stopped_by == "trials"


def test_exploring_ends_at_seven_tenths_of_the_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def search(*arguments: Any, limits: Any, **others: Any) -> Any:
        given.append(limits.time_limit)
        return original(*arguments, limits=limits, **others)

    original = tune.search
    monkeypatch.setattr(tune, "search", search)
    bench.search(time_limit=1000)
    bench.search(out=bench.folder / "other")
    of_1000, unlimited = given
    assert 600 < of_1000 < 700  # the search has looked at the model before
    assert unlimited is None


def test_finals_end_in_time_once_something_is_verified(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(config: Config, verifying: bool) -> Measurement:
        seen = by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})(config, verifying)
        if verifying:
            clock[0] += 200.0
        return dataclasses.replace(seen, seconds=200.0 if verifying else 0.1)

    clock, now = [0.0], time.monotonic
    monkeypatch.setattr(tune.time, "monotonic", lambda: now() + clock[0])
    # some 100 of which a busy machine may take itself
    result = bench.search(answer, time_limit=500)
    assert result.best
    assert result.best.verified
    assert result.search_seconds < 500
    assert bench.executor.verified == [8, 4]  # and not the best a second time
    bench.executor.asked.clear()
    bench.search(answer, time_limit=100, out=bench.folder / "short")
    assert bench.executor.verified == [8]  # one, however late


def test_finals_take_their_time_where_there_is_enough(bench: Bench) -> None:
    assert bench.search(time_limit=1000).runner_up


def test_a_probe_may_overrun_the_time_for_exploring_a_little_and_more_until_something_fits(
    bench: Bench,
) -> None:
    bench.search(time_limit=1000)
    first, *others = (plan.seconds for _, plan in bench.executor.asked[:4])
    assert 950 < first <= 1000
    assert all(750 < each <= 800 for each in others)
    bench.search(out=bench.folder / "other")
    assert bench.executor.asked[-1][1].seconds == math.inf


def test_a_probe_that_is_ended_with_the_search_s_time_is_no_measurement(bench: Bench) -> None:
    def answer(config: Config, verifying: bool) -> Measurement:
        if config["micro_batch_size"] != 8 or verifying:
            return by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0})(config, verifying)
        time.sleep(1.0)  # what the executor says that it took, and more than is left for exploring
        return missed(config, Outcome.TIMED_OUT)

    result = bench.search(answer, time_limit=1.0)
    assert result.stopped_by == "time"
    assert 8 not in [each.config["micro_batch_size"] for each in result.trials]


def test_probes_are_told_of_the_best_so_far(bench: Bench) -> None:
    bench.search()
    known = [plan.best_seconds for _, plan in bench.executor.asked]
    assert known[0] is None
    assert all(known[1:4])
    assert known[4:] == [None] * 3


def test_an_interrupt_leaves_what_there_is_and_can_be_resumed(bench: Bench) -> None:
    bench.executor.interrupt_at = 2
    first = bench.search()
    assert first.stopped_by == "interrupt"
    assert len(first.trials) == 2
    assert first.best
    assert not first.best.verified
    assert SavedResult.load(bench.folder / "run" / "result.yaml").config == first.best.config
    before = list(bench.executor.explored)
    second = bench.search(resume=True)
    assert second.stopped_by == "space"
    assert sorted(bench.executor.explored) == [1, 2, 4, 8]
    assert bench.executor.explored[:2] == before
    assert [trial.number for trial in second.trials] == [0, 1, 2, 3]
    assert second.best
    assert second.best.verified


def test_an_interrupt_while_verifying(bench: Bench) -> None:
    bench.executor.interrupt_at = 6
    first = bench.search()
    assert first.stopped_by == "interrupt"
    assert first.best
    assert first.best.config["micro_batch_size"] == 8
    assert len(first.trials) == 4
    second = bench.search(resume=True)
    assert len(bench.executor.explored) == 4
    assert second.best
    assert second.best.verified


def test_an_interrupt_before_anything_is_known(bench: Bench) -> None:
    bench.executor.interrupt_at = 0
    result = bench.search()
    assert result.stopped_by == "interrupt"
    assert result.best is None
    assert bench.search(resume=True).best


def test_an_interrupt_after_failures_only_is_an_interrupt(bench: Bench) -> None:
    bench.executor.interrupt_at = 1
    assert bench.search(lambda config, _: missed(config, Outcome.FAILED)).stopped_by == "interrupt"


def test_a_search_that_was_killed_before_its_first_measurement_is_resumed_from_its_start(
    bench: Bench,
) -> None:
    (bench.folder / "run" / "probes").mkdir(parents=True)
    (bench.folder / "run" / ".lock").touch()
    said: list[Event] = []
    assert len(bench.search(resume=True, listener=said.append).trials) == 4
    assert (
        Note(f"nothing was measured in {bench.folder / 'run'} before: the search starts anew.")
        in said
    )


def test_how_many_configs_no_prediction_is_known_of_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = bench.executor.run

    def run(function: Any, workload: Workload, *arguments: Any, log: str, timeout: float) -> Any:
        found = answer(function, workload, *arguments, log=log, timeout=timeout)
        if log == "estimate.log":
            # of the half of the time that predicting may take
            assert function.keywords["within"] == 0.6 * 0.5 * 100
            found = [[1.0 + number, *figures[1:]] for number, figures in enumerate(found)]
        return found

    monkeypatch.setattr(bench.executor, "run", run)
    said: list[Event] = []
    bench.search(time_limit=100, listener=said.append)
    reason = "their steps could not be followed, or not in the time for that"
    assert Note(f"3 of 4 configs are not predicted: {reason}.") in said


def test_an_interrupt_while_looking_leaves_the_directory_as_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inspect(*_: object) -> Any:
        (bench.folder / "run" / "probes" / "look.log").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(bench.executor, "inspect", inspect, raising=False)
        bench.search()
    assert not (bench.folder / "run" / "probes").exists()
    assert bench.search().best  # without resume


def test_resuming_a_finished_search_explores_nothing_new(bench: Bench) -> None:
    first = bench.search()
    second = bench.search(resume=True)
    assert len(bench.executor.explored) == 4
    assert second.trials == first.trials
    assert second.best
    assert first.best
    assert second.best.config == first.best.config
    assert second.skipped == first.skipped


def test_resuming_with_the_default_budget_is_resuming_the_same_search(bench: Bench) -> None:
    """By default a share of the free memory is used, which is never the same again."""
    first = bench.search(mem=None, trials=2)
    bench.executor.hardware = dataclasses.replace(
        tiny.CPU, host_free_bytes=tiny.CPU.host_free_bytes - MIB
    )
    second = bench.search(mem=None, resume=True)
    assert len(second.trials) == 4
    assert len(bench.executor.explored) == 4
    assert second.budget.device_bytes == first.budget.device_bytes
    assert not second.notes, "a difference that no figure shows"


@pytest.mark.parametrize("asked", [None, 141])
def test_what_ran_out_of_memory_beside_others_proves_nothing_of_a_card_that_is_free_again(
    bench: Bench, asked: float | None
) -> None:
    bench.executor.hardware = dataclasses.replace(CARD, used_bytes=40 * GIB)
    assert bench.search(mem=None, gpu_mem=asked, trials=2).budget.device_bytes == 100 * GIB
    bench.executor.hardware = CARD
    result = bench.search(mem=None, gpu_mem=asked, resume=True)
    assert result.budget.device_bytes == 100 * GIB
    assert (
        result.notes[0] == "the search continues with the budget it was started with, 100.00 GiB."
    )
    assert (
        bench.search(mem=None, gpu_mem=asked, out=bench.folder / "anew").budget.device_bytes
        == 140 * GIB
    )


@pytest.mark.parametrize(
    "change",
    [{"mem": 2}, {"set": {"micro_batch_size": [1, 2]}}, {"workload": tiny.mlp_workload(16)}],
    ids=["memory", "space", "workload"],
)
def test_resuming_a_search_of_something_else_is_refused(
    bench: Bench, change: dict[str, Any]
) -> None:
    bench.search(trials=2)
    with pytest.raises(InputError, match="holds a search of something else"):
        bench.search(resume=True, **change)


def test_what_was_verified_before_a_kill_is_read_back(bench: Bench) -> None:
    bench.executor.interrupt_at = 6  # of the finals the third
    bench.search()
    assert bench.executor.verified == [8, 4]

    resumed = bench.search(resume=True)
    assert sorted(bench.executor.explored) == [1, 2, 4, 8]
    assert bench.executor.verified == [8, 4, 8]  # the two rounds of the best, and one of its rival

    undisturbed = bench.search(out=bench.folder / "other")
    assert resumed.best == undisturbed.best
    assert resumed.finalists == undisturbed.finalists


def test_a_finished_search_resumes_to_the_same_answer_whatever_would_be_measured_now(
    bench: Bench,
) -> None:
    first = bench.search()
    written = (bench.folder / "run" / "result.yaml").read_bytes()
    asked = list(bench.executor.asked)

    for rate in (1.0, 100.0, 0.0):
        said: list[Event] = []
        again = bench.search(
            by_micro_batch(dict.fromkeys((1, 2, 4, 8), rate)), resume=True, listener=said.append
        )
        assert any(
            isinstance(event, Note) and event.text.startswith("this search had finished")
            for event in said
        )
        assert (again.best, again.runner_up, again.tiers) == (
            first.best,
            first.runner_up,
            first.tiers,
        )
        assert (again.trials, again.finalists, again.stopped_by) == (
            first.trials,
            first.finalists,
            first.stopped_by,
        )
        assert (bench.folder / "run" / "result.yaml").read_bytes() == written
    assert bench.executor.asked == asked


def test_a_finished_quick_search_resumes_to_the_same_answer(bench: Bench) -> None:
    first = bench.search(fast=True)
    asked = list(bench.executor.asked)
    again = bench.search(by_micro_batch(dict.fromkeys((1, 2, 4, 8), 3.0)), resume=True, fast=True)
    assert again.best == first.best
    assert bench.executor.asked == asked


def test_a_finished_search_goes_on_where_more_is_asked_for(bench: Bench) -> None:
    bench.search(trials=2)
    assert len(bench.executor.explored) == 2
    result = bench.search(trials=4, resume=True)
    assert sorted(bench.executor.explored) == [1, 2, 4, 8]
    assert result.best


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)


def timed_out(bench: Bench, monkeypatch: pytest.MonkeyPatch, which: Callable[[bool], bool]) -> None:
    """Probes that take all the time there is, but take none of it here: then it is over."""
    measure = bench.executor.measure

    def slow(workload: Workload, request: Request, *, number: int) -> Measurement:
        seen = measure(workload, request, number=number)
        seconds = request.plan.seconds
        if not which(verifies(request.plan)) or not math.isfinite(seconds):
            return seen
        later(monkeypatch, seconds)
        return Measurement(request.config, Outcome.TIMED_OUT, number=number, seconds=seconds)

    monkeypatch.setattr(bench.executor, "measure", slow)


def test_where_no_probe_ends_within_the_time_limit_the_search_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_out(bench, monkeypatch, lambda verifying: True)
    with pytest.raises(
        ProbeError, match=r"no probe ended within the time limit of 100 s"
    ) as caught:
        bench.search(time_limit=100)
    assert "--time-limit" in caught.value.remedy
    assert len(bench.executor.asked) == 1


def test_finals_that_the_time_is_up_for_leave_what_was_explored_and_are_done_when_it_is_resumed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        timed_out(bench, patched, lambda verifying: verifying)
        first = bench.search(time_limit=100)
    assert first.best
    assert not first.best.verified
    again = bench.search(time_limit=100, resume=True)
    assert len(bench.executor.explored) == 4
    assert again.best
    assert again.best.verified


def test_what_is_predicted_takes_no_more_than_is_left_for_exploring(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    run = bench.executor.run

    def slow(*arguments: Any, log: str, timeout: float) -> Any:
        given.extend([timeout] if log == "estimate.log" else [])
        return run(*arguments, log=log, timeout=timeout)

    inspect = bench.executor.inspect

    def late(*arguments: Any) -> Any:
        later(monkeypatch, 60)
        return inspect(*arguments)

    monkeypatch.setattr(bench.executor, "run", slow)
    monkeypatch.setattr(bench.executor, "inspect", late)
    bench.search(time_limit=100)
    assert given
    assert all(0 < each < 10.1 for each in given)


def test_a_model_that_hangs_when_it_is_looked_at_ends_with_the_time_limit(tmp_path: Path) -> None:
    def hang(model: nn.Module, batch: Any) -> Any:
        time.sleep(600)

    workload = dataclasses.replace(tiny.mlp_workload(8), loss=hang)
    began = time.monotonic()
    with pytest.raises(
        ProbeError, match=r"looking at the model took more than|does not answer"
    ) as caught:
        pipeline.run_search(
            workload,
            search_options(device="cpu", mem=1, time_limit=5, out=tmp_path / "run", store=False),
        )
    assert "time limit" in caught.value.remedy
    assert time.monotonic() - began < 30  # a busy machine may take its time
    assert not (tmp_path / "run").exists()
