"""One search: who is verified, what is recommended, what is written. Probes are a formula here."""

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import autofit
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import (
    Event,
    Note,
    PhaseStarted,
    ProbeFinished,
    ProbeStarted,
    SearchStarted,
)
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.record import Record
from autofit.core.result import Result, SavedResult
from autofit.core.workload import Workload
from autofit.estimate.calibration import calibration_for
from autofit.estimate.timeline import timelines
from autofit.probe import Plan
from autofit.search.verification import MOST
from autofit.tuning import artifacts, pipeline
from autofit.tuning import measured as tune
from autofit.tuning import space as offer
from autofit.tuning.remedies import what_helps
from tests import tiny
from tests.tuning.searching import TRAITS, Answer, Bench, by_micro_batch, fits, missed


def test_the_finalists_are_verified_in_turn_and_longer(bench: Bench) -> None:
    result = bench.search()
    assert sorted(bench.executor.explored) == [1, 2, 4, 8]
    assert bench.executor.verified == [8, 4, 8]
    assert not tune.VERIFY_PLAN.compose
    assert tune.VERIFY_PLAN.min_steps > Plan().min_steps
    assert result.best
    assert result.runner_up
    assert (
        result.best.config["micro_batch_size"],
        result.runner_up.config["micro_batch_size"],
    ) == (8, 4)
    assert result.best.verified
    assert result.runner_up.verified
    assert result.best.seconds == 2.0
    assert result.stopped_by == "space"
    assert result.space_size == 4


def test_rounds_are_joined_into_one_figure(bench: Bench) -> None:
    rates = iter([7.0, 9.0])

    def answer(config: Config, verifying: bool) -> Measurement:
        if verifying and config["micro_batch_size"] == 8:
            rate = next(rates)
            return fits(config, rate, int(rate) * MIB, tokens_per_second=rate * 10, steps=5)
        return by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})(config, verifying)

    best = bench.search(answer).best
    assert best
    mean = (8 / 7 + 8 / 9) / 2
    assert best.step_seconds == StepSeconds(pytest.approx(mean), 8 / 9 * 0.99, 8 / 7 * 1.01)
    assert best.samples_per_second == pytest.approx(8 / mean)
    assert best.tokens_per_second == pytest.approx(80 / mean)
    assert best.peak_bytes == PeakBytes(9 * MIB)
    assert best.steps == 10


def test_a_best_that_fails_gives_way_to_the_next(bench: Bench) -> None:
    result = bench.search(by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, verified={8: 0.0}))
    assert bench.executor.verified == [8, 4, 4, 2, 2]  # the 8 is not tried again
    assert result.best
    assert result.runner_up
    assert (
        result.best.config["micro_batch_size"],
        result.runner_up.config["micro_batch_size"],
    ) == (4, 2)
    assert result.tiers["full"] == result.best


def test_a_best_that_fails_in_its_second_round_gives_way_too(bench: Bench) -> None:
    seen: list[Any] = []

    def answer(config: Config, verifying: bool) -> Measurement:
        seen.append(config["micro_batch_size"])
        fails = verifying and config["micro_batch_size"] == 8 and seen.count(8) == 3
        return by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 0.0 if fails else 8.0})(config, verifying)

    result = bench.search(answer)
    assert result.best
    assert result.best.config["micro_batch_size"] == 4
    assert result.tiers["full"] == result.best


def test_when_all_finalists_fail_nothing_fits(bench: Bench) -> None:
    rates = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    result = bench.search(by_micro_batch(rates, verified=dict.fromkeys(rates, 0.0)))
    assert result.best is result.runner_up is None
    assert set(result.tiers.values()) == {None}
    assert sorted(bench.executor.verified) == [1, 2, 4, 8]


def test_an_only_one_that_fits_is_verified_alone(bench: Bench) -> None:
    result = bench.search(by_micro_batch({1: 1.0, 2: 0.0, 4: 0.0, 8: 0.0}))
    assert bench.executor.verified == [1, 1]
    assert result.best
    assert result.runner_up is None


def test_a_flattered_best_does_not_hide_a_faster_one(bench: Bench) -> None:
    """The short probes of two promised more than they kept; the third, only explored, is called up as well."""
    explored = {1: 1.0, 2: 7.0, 4: 8.0, 8: 9.0}
    result = bench.search(by_micro_batch(explored, verified={4: 5.0, 8: 5.5}))
    assert bench.executor.verified == [8, 4, 8, 2, 2]
    assert result.best
    assert result.best.config["micro_batch_size"] == 2


def test_a_fast_search_answers_after_few_probes_and_one_longer_run(bench: Bench) -> None:
    bench.space(micro_batch_size=[1, 2, 4, 8], optimizer=["adamw", "sgd"])
    result = bench.search(fast=True)
    assert len(result.trials) == tune.FAST_PROBES
    assert [plan for _, plan in bench.executor.asked][tune.FAST_PROBES :] == [tune.FAST_PLAN]
    assert result.best
    assert result.best.verified
    assert [each.config for each in result.finalists] == [result.best.config]
    assert not any(each.verified for each in result.trials)
    assert any("--fast" in note for note in result.notes)


def test_a_fast_search_goes_on_until_something_fits(bench: Bench) -> None:
    result = bench.search(by_micro_batch({1: 1.0, 2: 0.0, 4: 0.0, 8: 0.0}), fast=True)
    assert result.best
    assert result.best.config["micro_batch_size"] == 1


def test_no_more_than_a_few_are_called_up(bench: Bench) -> None:
    bench.space(micro_batch_size=[1, 2, 4, 8], optimizer=["adamw", "sgd"])

    def answer(config: Config, verifying: bool) -> Measurement:
        micro = int(str(config["micro_batch_size"]))
        return fits(config, 1.0 if verifying else micro + 10.0 + (config["optimizer"] == "sgd") / 2)

    assert len(bench.search(answer, tolerance=0.01).finalists) == MOST


def test_a_machine_that_changed_its_speed_is_told_of(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.search().notes == ()
    original = tune.search
    monkeypatch.setattr(
        tune, "search", lambda *a, **k: dataclasses.replace(original(*a, **k), slowdown=0.2)
    )
    assert "speed changed by 20 %" in bench.search(out=bench.folder / "other").notes[0]


def test_what_was_odd_about_the_best_is_told(bench: Bench) -> None:
    told = bench.search(lambda config, _: fits(config, 1.0, warnings=("it grew warm.",))).notes
    assert "Of the best config: it grew warm." in told
    assert any(note.startswith("Too close to call: ") for note in told)


# What is recommended


def precisions(fast: float, faithful: float) -> Answer:
    return lambda config, _: fits(config, fast if config["precision"] == "bf16" else faithful)


@pytest.mark.parametrize(
    ("faithful", "tolerance", "chosen"),
    [(98.0, 0.03, "fp32"), (96.0, 0.03, "bf16"), (98.0, 0.0, "bf16"), (96.0, 0.05, "fp32")],
)
def test_of_tied_ones_the_most_faithful_is_best(
    bench: Bench, faithful: float, tolerance: float, chosen: str
) -> None:
    bench.space(precision=["bf16", "fp32"], micro_batch_size=[8])
    best = bench.search(precisions(100.0, faithful), tolerance=tolerance, prefer="fast").best
    assert best
    assert best.config["precision"] == chosen


@pytest.mark.parametrize(
    ("prefer", "chosen"), [("faithful", "fp32"), ("balanced", "fp32"), ("fast", "bf16")]
)
def test_the_best_is_chosen_by_what_is_preferred(bench: Bench, prefer: str, chosen: str) -> None:
    bench.space(precision=["bf16", "fp32"], micro_batch_size=[8])
    best = bench.search(precisions(100.0, 80.0), prefer=prefer).best
    assert best
    assert best.config["precision"] == chosen


def test_every_tier_has_a_best(bench: Bench) -> None:
    bench.space(lora_rank=[0, 8, 16], lora_targets=["all-linear"], micro_batch_size=[8])
    rates = {0: 5.0, 8: 10.0, 16: 9.0}
    result = bench.search(lambda config, _: fits(config, rates[int(str(config["lora_rank"]))]))
    ranks = {name: each and each.config["lora_rank"] for name, each in result.tiers.items()}
    assert ranks == {"full": 0, "lora": 8, "qlora": None, "head": None}
    assert result.tiers["lora"] == result.best
    assert result.tiers["full"]
    assert result.tiers["full"].verified


def test_the_best_is_the_best_of_its_tier(bench: Bench) -> None:
    """Even where another one, only explored, seemed a little faster and more faithful than the best turned out."""
    bench.space(precision=["bf16", "bf16-mixed", "fp32"], micro_batch_size=[8])
    explored = {"bf16": 110.0, "bf16-mixed": 105.0, "fp32": 101.0}

    def answer(config: Config, verifying: bool) -> Measurement:
        precision = str(config["precision"])
        return fits(
            config, {"bf16": 100.0}.get(precision, 90.0) if verifying else explored[precision]
        )

    result = bench.search(answer, prefer="fast")
    assert result.best
    assert result.best.config["precision"] == "bf16"
    assert result.tiers["full"] == result.best


def test_where_all_is_refused_the_reason_is_told(bench: Bench) -> None:
    with pytest.raises(
        InputError,
        match=r"every config of this search is refused, .*precision: tf32 is .*; use fp32",
    ):
        bench.search(set={"precision": "tf32"})


def test_nothing_fits(bench: Bench) -> None:
    result = bench.search(by_micro_batch({1: 0.0, 2: 0.0, 4: 0.0, 8: 0.0}))
    assert result.best is None
    assert result.stopped_by == "space"
    assert result.nearest_miss
    assert result.nearest_miss.config["micro_batch_size"] == 1
    assert not bench.executor.verified
    # 1 proves it for 2 and 4, but not for 8, which accumulates nothing
    assert result.skipped["dominated"] == 2
    report = bench.folder / "run" / "report.html"
    assert result.files == {"result": None, "script": None, "exports": None, "report": str(report)}
    assert "Nothing fits" in report.read_text()
    assert not (bench.folder / "run" / "result.yaml").exists()


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.FITS])
def test_only_failures_throughout_mean_that_probes_do_not_run(
    bench: Bench, outcome: Outcome
) -> None:
    def answer(config: Config, _: bool) -> Measurement:
        return missed(config, outcome)

    if outcome is Outcome.FAILED:
        with pytest.raises(ProbeError, match="every probe failed: its reason"):
            bench.search(answer)
    else:
        assert bench.search(answer).best is None


def test_refused_configs_are_never_probed(bench: Bench) -> None:
    bench.executor.traits = dataclasses.replace(TRAITS, splits=False)
    result = bench.search()
    assert bench.executor.explored == [8]
    assert result.skipped["refused"] == 3


# What lies around the best


def predicting(bench: Bench, rates: Mapping[int, float], off: float = 1.0) -> None:
    """Predictions of the rates of micro-batches, all off by the same factor, and of a MiB for each sample."""

    def run(
        function: Any, workload: Workload, hardware: Hardware, configs: Any, *_: Any, **__: Any
    ) -> Any:
        if function is timelines or function is what_helps:
            raise ProbeError("it took too long.")
        sizes = [int(str(config["micro_batch_size"])) for config in configs]
        return [size * MIB for size in sizes], [8 / rates[size] * off for size in sizes]

    bench.executor.run = run  # type: ignore[method-assign]


def test_the_frontier_reaches_beyond_the_budget(bench: Bench) -> None:
    """4 of 8 MiB fit: the next ones are only predicted, and as much off as predictions were seen to be."""
    rates = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    predicting(bench, rates, off=0.5)
    result = bench.search(by_micro_batch({**rates, 8: 0.0}), mem=4 / 1024)
    points = result.frontier["full"]
    assert [round(point.peak_bytes / MIB) for point in points] == [1, 2, 4, 8]
    assert [point.samples_per_second for point in points] == pytest.approx(
        [1.0, 2.0, 4.0, 8.0], rel=0.05
    )
    fitted = {trial.config for trial in result.trials if trial.fits}
    assert [point.measured for point in points] == [point.config in fitted for point in points]
    assert not points[-1].measured
    found = {
        each.why: result.fastest_within(each.device_bytes)["full"] for each in result.other_budgets
    }
    assert {why: point and point.config["micro_batch_size"] for why, point in found.items()} == {
        "half of it": 2,
        "twice as much": 8,
    }, "a quarter more would run the same"
    changes = {each.value: each for each in result.alternatives if each.knob == "micro_batch_size"}
    assert {value: each.fits for value, each in changes.items()} == {1: True, 2: True, 8: False}
    assert len(changes) == len(result.alternatives)
    assert result.predicted
    assert "(twice as much): " in autofit.explain(result)
    assert "% faster with micro-batch 8x1 (predicted)" in autofit.explain(result)


@pytest.mark.parametrize(("waiting", "seconds"), [(0.0, 2.0), (0.9, 1.0)])
def test_how_busy_the_machine_was_says_whether_step_times_are_learnt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, waiting: float, seconds: float
) -> None:
    rates = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    predicting(bench, {micro: 2 * rate for micro, rate in rates.items()})
    monkeypatch.setattr(tune, "Contention", lambda: SimpleNamespace(share=lambda: waiting))
    bench.search(by_micro_batch(rates))
    assert calibration_for(tiny.CPU).seconds == pytest.approx(seconds)


def test_what_failed_when_verified_is_on_no_frontier(bench: Bench) -> None:
    rates = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    predicting(bench, rates)
    result = bench.search(by_micro_batch(rates, verified={8: 0.0}))
    assert [point.config["micro_batch_size"] for point in result.frontier["full"]] == [1, 2, 4]


def test_without_predictions_nothing_is_said_of_larger_budgets(bench: Bench) -> None:
    result = bench.search(by_micro_batch({1: 1.0, 2: 2.0, 4: 0.0, 8: 0.0}), mem=2 / 1024)
    assert not result.predicted
    assert all(point.measured for point in result.frontier["full"])
    assert "twice as much" not in autofit.explain(result)
    assert "half of it): 50 % slower with micro-batch 1x8 (measured)" in autofit.explain(result)


def test_an_interrupted_search_has_a_frontier_of_what_it_saw(bench: Bench) -> None:
    bench.executor.interrupt_at = 2
    result = bench.search()
    assert result.best
    assert {point.config for point in result.frontier["full"]} <= {
        trial.config for trial in result.trials
    }
    assert result.fastest_within(GIB)["full"]


# What is written and told


def test_the_default_space(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: Any, offered: Any) -> Any:
        asked.append(name)
        return original(bench.folder / "space.yaml", offered)

    original = offer.load_space
    monkeypatch.setattr(offer, "load_space", load)
    for workload in (tiny.llama_workload(8), tiny.mlp_workload(8)):
        bench.search(space=None, workload=workload, out=bench.folder / workload.name)
    assert asked == ["everything", "full"]


def test_events_tell_the_whole_search(bench: Bench) -> None:
    bench.executor.traits = dataclasses.replace(TRAITS, notes=("the loss is odd.",))
    events: list[Event] = []
    bench.search(trials=3, listener=events.append)
    started = SearchStarted("mlp", tiny.CPU, Budget(GIB, int(8 * GIB * 0.8)), 4, 3, None)
    looking, predicting, following, writing = (
        PhaseStarted(doing)
        for doing in (
            "looking at the model and the device",
            "predicting 4 configs before the first probe",
            "following a training step of the best configs, for the report",
            "writing the result and the report",
        )
    )
    before = [looking, Note("the loss is odd."), started, predicting]
    assert events[: len(before)] == before
    assert events[-2:] == [following, writing]
    probes = [event for event in events[len(before) : -2] if not isinstance(event, Note)]
    assert [type(event) for event in probes] == [ProbeStarted, ProbeFinished] * 6
    assert [event.verifying for event in probes if isinstance(event, ProbeStarted)] == [
        False
    ] * 3 + [True] * 3
    rates = [
        event.best.throughput for event in probes if isinstance(event, ProbeFinished) and event.best
    ]
    assert rates == sorted(rates)


def test_the_predicted_peak_is_told_where_there_is_one(bench: Bench) -> None:
    events: list[Event] = []
    predicting(bench, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    bench.search(by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}), listener=events.append)
    begun = [event for event in events if isinstance(event, ProbeStarted)]
    explored = {
        event.config["micro_batch_size"]: event.expected_bytes
        for event in begun
        if not event.verifying
    }
    assert explored and explored == {size: int(str(size)) * MIB for size in explored}
    assert {event.expected_bytes for event in begun if event.verifying} == {None}


def test_an_interrupted_search_says_nothing_of_following_steps(bench: Bench) -> None:
    def interrupt(config: Config, verifying: bool) -> Measurement:
        raise KeyboardInterrupt

    events: list[Event] = []
    bench.search(interrupt, listener=events.append)
    doing = [event.doing for event in events if isinstance(event, PhaseStarted)]
    assert doing[-1] == "writing the result and the report"
    assert not any("following" in each for each in doing)


def test_the_run_directory(bench: Bench) -> None:
    result = bench.search(workload=tiny.llama_workload(8))
    run = bench.folder / "run"
    assert result.run_directory == str(run)
    names = {
        "result": "result.yaml",
        "script": "train.py",
        "exports": "exports",
        "report": "report.html",
    }
    assert result.files == {name: str(run / file) for name, file in names.items()}
    left = {".lock", "probes", "journal.log", "result.json", *names.values()}
    assert {path.name for path in run.iterdir()} == left
    compile((run / "train.py").read_text(), "train.py", "exec")
    saved = SavedResult.load(run / "result.yaml")
    assert result.best
    assert saved.config == result.best.config
    assert saved.source == {"kind": "directory", "path": "tiny"}
    assert saved.workload == {"task": "causal-lm", "sequence_length": 16, "effective_batch_size": 8}
    assert saved.measured["verified"] is True
    device = {"device": "cpu", "name": "a CPU", "memory_gib": 8.0, "devices": 1, "nodes": 1}
    assert saved.hardware == {**device, "budget_gib": 1.0, "margin": 0.05}


def test_the_record_is_the_result_and_what_was_predicted_of_it(bench: Bench) -> None:
    predicting(bench, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, off=0.5)
    result = bench.search(by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 0.0}), seed=7)
    record = Record.load(bench.folder / "run" / "result.json")
    assert record.result == dataclasses.replace(
        result, search_seconds=round(result.search_seconds, 3)
    )
    assert record.options["seed"] == 7
    sizes = [int(str(trial.config["micro_batch_size"])) for trial in result.trials]
    assert [each.allocated_bytes for each in record.predicted] == [size * MIB for size in sizes]
    # the step could not be followed, and the search is not the worse for it
    assert not record.timelines


def test_a_report_that_cannot_be_drawn_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise ValueError("no ink")

    monkeypatch.setattr(artifacts, "report_page", fail)
    events: list[Event] = []
    result = bench.search(listener=events.append)
    assert result.best
    assert result.files["report"] is None
    assert any(isinstance(event, Note) and "no ink" in event.text for event in events)
    assert Record.load(bench.folder / "run" / "result.json").result.best == result.best


def test_a_model_of_ones_own_gets_no_script(bench: Bench) -> None:
    assert bench.search().files["script"] is None
    assert not (bench.folder / "run" / "train.py").exists()


def test_runs_get_a_directory_of_their_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    workload = dataclasses.replace(tiny.mlp_workload(8), name="my/model: 7b" + "x" * 300)
    result = bench.search(out=None, workload=workload)
    (run,) = (bench.folder / "autofit-runs").iterdir()
    assert result.run_directory == str(run)
    assert run.name.startswith("my-model-7bxxx")


def test_two_searches_that_are_started_in_the_same_second_have_directories_of_their_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.folder)
    monkeypatch.setattr(pipeline, "datetime", mock.Mock(now=lambda: datetime(2026, 1, 2)))
    others: list[Result] = []

    def answer(config: Config, _: bool) -> Measurement:
        if not others:
            others.append(bench.search(lambda config, _: fits(config, 1.0), out=None, trials=1))
        return fits(config, 1.0)

    first = bench.search(answer, out=None, trials=1)
    names = [Path(str(each.run_directory)).name for each in (first, *others)]
    assert names == ["mlp-20260102-000000", "mlp-20260102-000000-2"]


@pytest.mark.parametrize("named", [True, False], ids=["given", "default"])
def test_bad_input_leaves_no_run_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.chdir(bench.folder)
    out = bench.folder / "run" if named else None
    with pytest.raises(
        InputError, match=r"unknown knob to search 'precison'\. Did you mean 'precision'"
    ):
        bench.search(out=out, set={"precison": ("fp32",)})
    assert not any(bench.folder.glob("autofit-runs/*"))
    assert bench.search(out=out).best


def test_a_run_in_use_is_refused(bench: Bench) -> None:
    def answer(config: Config, _: bool) -> Measurement:
        with pytest.raises(InputError, match="already holds a search"):
            bench.search()
        with pytest.raises(InputError, match="is in use by another autofit process"):
            bench.search(resume=True)
        return fits(config, 1.0)

    assert bench.search(answer, trials=1).best
