"""What joins a search together: who is verified, what is recommended, what is written. Probes are a formula here."""

import dataclasses
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autofit
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event, Note, PhaseStarted, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.options import search_options
from autofit.core.record import Record
from autofit.core.result import Result, SavedResult
from autofit.core.workload import Traits, Workload
from autofit.estimate import calibration_for, timelines
from autofit.hardware.catalogue import card
from autofit.probe import Plan, Request
from autofit.search.verification import MOST
from autofit.tuning import artifacts
from autofit.tuning import run as tune
from autofit.tuning import space as offer
from autofit.tuning.measurement_store import Store
from tests import tiny

TRAITS = Traits(parameters=1000, blocks=2, linears=4, attention=False, sdpa=False, batch_norm=False, dropout=False)
CARD = dataclasses.replace(
    tiny.CPU, device="cuda", name="NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0), context_bytes=GIB // 2
)

Answer = Callable[[Config, bool], Measurement]


def fits(config: Config, rate: float, peak: int = MIB, **others: Any) -> Measurement:
    """A probe that saw so many samples a second, of batches of 8."""
    step = 8 / rate
    return Measurement(
        config=config,
        outcome=Outcome.FITS,
        step_seconds=StepSeconds(step, step * 0.99, step * 1.01),
        samples_per_second=rate,
        peak_bytes=PeakBytes(peak),
        **others,
    )


def missed(config: Config, outcome: Outcome = Outcome.OUT_OF_MEMORY, peak: int = MIB) -> Measurement:
    return Measurement(config=config, outcome=outcome, peak_bytes=PeakBytes(peak), reason="Traceback:\nits reason")


def by_micro_batch(explored: Mapping[int, float], verified: Mapping[int, float] | None = None) -> Answer:
    """Rates by micro-batch, when exploring and when verifying; 0 is out of memory."""

    def answer(config: Config, verifying: bool) -> Measurement:
        micro = config["micro_batch_size"]
        assert isinstance(micro, int)
        rate = (verified or {}).get(micro, explored[micro]) if verifying else explored[micro]
        return fits(config, rate, micro * MIB) if rate else missed(config, peak=micro * MIB)

    return answer


class FakeExecutor:
    """Stands in for a LocalExecutor: looks at nothing and measures by a formula."""

    def __init__(self, answer: Answer, hardware: Hardware, traits: Traits) -> None:
        self.answer = answer
        self.hardware = hardware
        self.traits = traits
        self.asked: list[tuple[Config, Plan]] = []
        self.interrupt_at: int | None = None  # the probe, from 0, in which Ctrl-C is pressed

    def __enter__(self) -> "FakeExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def look(self, workload: Workload, device: str | None, budget_bytes: int | None) -> tuple[Hardware, Traits]:
        return self.hardware, self.traits

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        if len(self.asked) == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.asked.append((request.config, request.plan))
        seen = self.answer(request.config, request.plan == tune.VERIFY_PLAN)
        return dataclasses.replace(seen, number=number, seconds=1.0)

    def cards(self) -> tuple[str, ...]:
        return ("0",)

    def run(self, function: Any, workload: Workload, *arguments: Any, log: str, timeout: float) -> Any:
        """Asked to predict configs, it knows nothing; asked to follow a step, it cannot."""
        if function is timelines:
            return [None for _ in arguments[1]]
        unknown = [math.nan] * len(arguments[1])
        return unknown, unknown

    @property
    def explored(self) -> list[Any]:
        """The micro-batches of the exploring probes, in order."""
        return [config["micro_batch_size"] for config, plan in self.asked if plan != tune.VERIFY_PLAN]

    @property
    def verified(self) -> list[Any]:
        return [config["micro_batch_size"] for config, plan in self.asked if plan == tune.VERIFY_PLAN]


class Bench(SimpleNamespace):
    """A run directory, a space and a fake executor to search with."""

    folder: Path
    executor: FakeExecutor

    def search(self, answer: Answer | None = None, **options: Any) -> Result:
        if answer is not None:
            self.executor.answer = answer
        workload = options.pop("workload", None) or tiny.mlp_workload(8)
        listener = options.pop("listener", None)
        given = {
            "space": str(self.folder / "space.yaml"),
            "mem": 1,
            "out": self.folder / "run",
            "store": False,
            **options,
        }
        return tune.run_search(workload, search_options(**given), listener)

    def space(self, **knobs: Any) -> None:
        lines = [f"  {name}: {values}" for name, values in knobs.items()]
        (self.folder / "space.yaml").write_text("\n".join(["description: for a test", "knobs:", *lines]))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    executor = FakeExecutor(by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}), tiny.CPU, TRAITS)
    monkeypatch.setattr(tune, "LocalExecutor", lambda logs, timeout: executor)
    made = Bench(folder=tmp_path, executor=executor)
    made.space(micro_batch_size=[1, 2, 4, 8])
    yield made


# Verifying


def test_the_finalists_are_verified_in_turn_and_longer(bench: Bench) -> None:
    result = bench.search()
    assert sorted(bench.executor.explored) == [1, 2, 4, 8]
    assert bench.executor.verified == [8, 4, 8, 4]
    assert not tune.VERIFY_PLAN.compose
    assert tune.VERIFY_PLAN.min_steps > Plan().min_steps
    assert result.best
    assert result.runner_up
    assert (result.best.config["micro_batch_size"], result.runner_up.config["micro_batch_size"]) == (8, 4)
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
    assert (result.best.config["micro_batch_size"], result.runner_up.config["micro_batch_size"]) == (4, 2)
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
    result = bench.search(by_micro_batch(explored, verified={4: 5.0, 8: 6.0}))
    assert bench.executor.verified == [8, 4, 8, 4, 2, 2]
    assert result.best
    assert result.best.config["micro_batch_size"] == 2


def test_no_more_than_a_few_are_called_up(bench: Bench) -> None:
    bench.space(micro_batch_size=[1, 2, 4, 8], optimizer=["adamw", "sgd"])

    def answer(config: Config, verifying: bool) -> Measurement:
        micro = int(str(config["micro_batch_size"]))
        return fits(config, 1.0 if verifying else micro + 10.0 + (config["optimizer"] == "sgd") / 2)

    bench.search(answer, tolerance=0.01)
    assert len(bench.executor.verified) == 2 * MOST


def test_a_machine_that_changed_its_speed_is_told_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.search().notes == ()
    original = tune.search
    monkeypatch.setattr(tune, "search", lambda *a, **k: dataclasses.replace(original(*a, **k), slowdown=0.2))
    assert "speed changed by 20 %" in bench.search(out=bench.folder / "other").notes[0]


def test_what_was_odd_about_the_best_is_told(bench: Bench) -> None:
    told = bench.search(lambda config, _: fits(config, 1.0, warnings=("it grew warm.",))).notes
    assert told == ("Of the best config: it grew warm.",)


# What is recommended


def precisions(fast: float, faithful: float) -> Answer:
    return lambda config, _: fits(config, fast if config["precision"] == "bf16" else faithful)


@pytest.mark.parametrize(
    ("faithful", "tolerance", "chosen"),
    [(98.0, 0.03, "fp32"), (96.0, 0.03, "bf16"), (98.0, 0.0, "bf16"), (96.0, 0.05, "fp32")],
)
def test_of_tied_ones_the_most_faithful_is_best(bench: Bench, faithful: float, tolerance: float, chosen: str) -> None:
    bench.space(precision=["bf16", "fp32"], micro_batch_size=[8])
    best = bench.search(precisions(100.0, faithful), tolerance=tolerance).best
    assert best
    assert best.config["precision"] == chosen


def test_every_tier_has_a_best(bench: Bench) -> None:
    bench.space(lora_rank=[0, 8, 16], lora_targets=["all-linear"], micro_batch_size=[8])
    rates = {0: 5.0, 8: 10.0, 16: 9.0}
    result = bench.search(lambda config, _: fits(config, rates[int(str(config["lora_rank"]))]))
    ranks = {name: each and each.config["lora_rank"] for name, each in result.tiers.items()}
    assert ranks == {"full": 0, "lora": 8, "qlora": None}
    assert result.tiers["lora"] == result.best
    assert result.tiers["full"]
    assert not result.tiers["full"].verified


def test_the_best_is_the_best_of_its_tier(bench: Bench) -> None:
    """Even where another one, only explored, seemed a little faster and more faithful than the best turned out."""
    bench.space(precision=["bf16", "bf16-mixed", "fp32"], micro_batch_size=[8])
    explored = {"bf16": 110.0, "bf16-mixed": 105.0, "fp32": 101.0}

    def answer(config: Config, verifying: bool) -> Measurement:
        precision = str(config["precision"])
        return fits(config, {"bf16": 100.0}.get(precision, 90.0) if verifying else explored[precision])

    result = bench.search(answer)
    assert result.best
    assert result.best.config["precision"] == "bf16"
    assert result.tiers["full"] == result.best


def test_where_all_is_refused_the_reason_is_told(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"every config of this search is refused, .*precision: tf32 is .*; use fp32"):
        bench.search(set={"precision": "tf32"})


def test_nothing_fits(bench: Bench) -> None:
    result = bench.search(by_micro_batch({1: 0.0, 2: 0.0, 4: 0.0, 8: 0.0}))
    assert result.best is None
    assert result.stopped_by == "space"
    assert result.nearest_miss
    assert result.nearest_miss.config["micro_batch_size"] == 1
    assert not bench.executor.verified
    assert result.skipped["dominated"] == 2  # 1 proves it for 2 and 4, but not for 8, which accumulates nothing
    report = bench.folder / "run" / "report.html"
    assert result.files == {"result": None, "script": None, "exports": None, "report": str(report)}
    assert "Nothing fits" in report.read_text()
    assert not (bench.folder / "run" / "result.yaml").exists()


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.FITS])
def test_only_failures_throughout_mean_that_probes_do_not_run(bench: Bench, outcome: Outcome) -> None:
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

    def run(function: Any, workload: Workload, hardware: Hardware, configs: Any, *, log: str, timeout: float) -> Any:
        if function is timelines:
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
    assert [point.samples_per_second for point in points] == pytest.approx([1.0, 2.0, 4.0, 8.0], rel=0.05)
    fitted = {trial.config for trial in result.trials if trial.fits}
    assert [point.measured for point in points] == [point.config in fitted for point in points]
    assert not points[-1].measured
    found = {each.why: result.fastest_within(each.device_bytes)["full"] for each in result.other_budgets}
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
    assert {point.config for point in result.frontier["full"]} <= {trial.config for trial in result.trials}
    assert result.fastest_within(GIB)["full"]


# Limits, interrupts, resuming


def test_trials_are_a_limit(bench: Bench) -> None:
    result = bench.search(trials=2)
    assert len(bench.executor.explored) == len(result.trials) == 2
    assert result.stopped_by == "trials"


def test_exploring_gets_three_quarters_of_the_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def search(*arguments: Any, limits: Any, **others: Any) -> Any:
        given.append(limits.time_limit)
        return original(*arguments, limits=limits, **others)

    original = tune.search
    monkeypatch.setattr(tune, "search", search)
    bench.search(time_limit=100)
    bench.search(out=bench.folder / "other")
    assert given == [75, None]


def test_probes_are_told_of_the_best_so_far(bench: Bench) -> None:
    bench.search()
    known = [plan.best_seconds for _, plan in bench.executor.asked]
    assert known[0] is None
    assert all(known[1:4])
    assert known[4:] == [None] * 4


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


def test_an_interrupt_while_looking_leaves_the_directory_as_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> Any:
        (bench.folder / "run" / "probes" / "look.log").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(bench.executor, "look", look, raising=False)
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
    bench.executor.hardware = dataclasses.replace(tiny.CPU, host_free_bytes=tiny.CPU.host_free_bytes - MIB)
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
    assert result.notes[0] == "the search continues with the budget it was started with, 100.00 GiB."
    assert bench.search(mem=None, gpu_mem=asked, out=bench.folder / "anew").budget.device_bytes == 140 * GIB


@pytest.mark.parametrize(
    "change",
    [{"mem": 2}, {"set": {"micro_batch_size": [1, 2]}}, {"workload": tiny.mlp_workload(16)}],
    ids=["memory", "space", "workload"],
)
def test_resuming_a_search_of_something_else_is_refused(bench: Bench, change: dict[str, Any]) -> None:
    bench.search(trials=2)
    with pytest.raises(InputError, match="holds a search of something else"):
        bench.search(resume=True, **change)


# The budget and the card


def test_a_card_by_name(bench: Bench) -> None:
    bench.executor.hardware = CARD
    result = bench.search(gpu="rtx-4090", mem=None)
    assert result.hardware.memory_bytes == result.budget.device_bytes == card("rtx-4090").memory_bytes
    assert result.hardware.capability == (8, 9)
    assert "4090" in result.hardware.name
    assert result.hardware.measured_on == "NVIDIA H200"
    assert "measured_on: NVIDIA H200" in (bench.folder / "run" / "result.yaml").read_text()


def test_a_card_larger_than_the_one_here(bench: Bench) -> None:
    bench.executor.hardware = dataclasses.replace(CARD, name="small", memory_bytes=20 * GIB)
    with pytest.raises(InputError, match=r"has more memory than the card here: small has 20\.0 GiB"):
        bench.search(gpu="rtx-4090", mem=None)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("rtx-4091", r"unknown GPU 'rtx-4091'\. Did you mean 'rtx-409"),
        ("mi300x", r"AMD Instinct MI300X is not supported: autofit runs on cards that take CUDA\."),
    ],
)
def test_a_card_that_cannot_be_is_told_before_the_device_is_asked(bench: Bench, gpu: str, words: str) -> None:
    bench.executor.look = None  # type: ignore[assignment,method-assign]
    with pytest.raises(InputError, match=words):
        bench.search(gpu=gpu, mem=None)


def test_the_card_that_is_here_has_what_its_driver_says(bench: Bench) -> None:
    bench.executor.hardware = dataclasses.replace(CARD, name="NVIDIA H100 80GB HBM3", memory_bytes=79 * GIB)
    result = bench.search(gpu="h100", mem=None)
    assert result.hardware == bench.executor.hardware
    assert result.budget.device_bytes == 79 * GIB
    assert not result.notes


def test_what_becomes_of_a_budget_is_said_at_once_and_in_the_result(bench: Bench) -> None:
    bench.executor.hardware = dataclasses.replace(CARD, used_bytes=4 * GIB)
    said: list[Any] = []
    result = bench.search(gpu_mem=141, mem=None, listener=said.append)
    assert result.budget.device_bytes == 136 * GIB
    assert result.notes[:2] == (
        "--gpu-mem 141 means the card: NVIDIA H200 has 140.0 GiB.",
        "4.0 of the card's 140.0 GiB are in use: the budget is what is free, 136.00 GiB.",
    )
    assert [event.text for event in said if isinstance(event, Note)][:2] == list(result.notes[:2])


# The store


@pytest.fixture
def stored(bench: Bench) -> Bench:
    """A bench whose searches keep what they measure."""
    bench.executor.traits = dataclasses.replace(TRAITS, fingerprint="f00")
    return bench


def again(bench: Bench, name: str, **options: Any) -> Result:
    bench.executor.asked.clear()
    return bench.search(store=True, out=bench.folder / name, **options)


def plans() -> list[tuple[Any, str]]:
    """The micro-batches and plans of all that is stored."""
    with sqlite3.connect(Store().path) as file:
        rows = file.execute("SELECT config, plan FROM measurements ORDER BY id").fetchall()
    file.close()
    return [(json.loads(config)["micro_batch_size"], plan) for config, plan in rows]


def test_a_second_search_begins_with_the_best_of_the_first_and_reports_nothing_else_of_it(stored: Bench) -> None:
    first = again(stored, "first", trials=2)
    assert stored.executor.explored == [1, 8]
    assert plans() == [(1, "explored"), (8, "explored"), *[(8, "verified"), (1, "verified")] * 2]
    second = again(stored, "second", trials=1)
    assert stored.executor.explored == [8]
    assert [trial.config["micro_batch_size"] for trial in second.trials] == [8]
    assert second.best
    assert first.best
    assert second.best.config == first.best.config
    assert second.runner_up is None


def test_without_the_store_nothing_is_known_and_nothing_kept(stored: Bench) -> None:
    again(stored, "first", trials=3)
    before = plans()
    stored.search(trials=1, out=stored.folder / "second")
    assert stored.executor.explored[-1] == 1
    assert plans() == before


def test_an_interrupt_and_an_error_lose_nothing_of_what_was_measured(stored: Bench) -> None:
    stored.executor.interrupt_at = 2
    assert again(stored, "first").stopped_by == "interrupt"
    assert plans() == [(1, "explored"), (8, "explored")]

    def answer(config: Config, _: bool) -> Measurement:
        if len(stored.executor.asked) == 2:
            raise ProbeError("the zygote is gone.")
        return fits(config, 1.0)

    with pytest.raises(ProbeError):
        again(stored, "second", answer=answer)
    assert len(plans()) == 3


def test_a_search_that_is_resumed_knows_what_others_measured_and_its_own_from_its_journal(stored: Bench) -> None:
    said: list[Event] = []
    again(stored, "run", trials=2, listener=said.append)
    again(stored, "run", trials=4, resume=True, listener=said.append)
    assert not any("earlier searches" in event.text for event in said if isinstance(event, Note))
    assert sorted(size for size, plan in plans() if plan == "explored") == [1, 2, 4, 8]
    again(stored, "other", trials=1, listener=said.append)
    assert Note("earlier searches measured 4 configs: they tell where to start (--no-store leaves them out)") in said


def test_another_budget_is_answered_by_the_same_measurements(stored: Bench) -> None:
    again(stored, "large")
    small = again(stored, "small", mem=5 * MIB / GIB)  # the 4 takes 4 MiB
    assert stored.executor.explored[0] == 4
    assert 8 not in stored.executor.explored
    assert small.skipped["dominated"] == 1


def test_a_card_that_stands_for_another_is_found_by_what_it_is(stored: Bench) -> None:
    stored.executor.hardware = CARD
    said: list[Event] = []
    again(stored, "first", mem=None, gpu_mem=24, trials=2)
    again(stored, "second", mem=None, gpu="rtx-4090", trials=1, listener=said.append)
    assert any("earlier searches measured 2 configs" in event.text for event in said if isinstance(event, Note))


def test_a_model_that_cannot_be_told_from_others_is_told_of(bench: Bench) -> None:
    said: list[Event] = []
    again(bench, "first", trials=1, listener=said.append)
    (note,) = [event.text for event in said if isinstance(event, Note)]
    assert note.startswith("this model's code cannot be told from another's")
    assert not Store().path.exists()


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
    assert [type(event) for event in probes] == [ProbeStarted, ProbeFinished] * 7
    assert [event.verifying for event in probes if isinstance(event, ProbeStarted)] == [False] * 3 + [True] * 4
    rates = [event.best.throughput for event in probes if isinstance(event, ProbeFinished) and event.best]
    assert rates == sorted(rates)


def test_the_predicted_peak_is_told_where_there_is_one(bench: Bench) -> None:
    events: list[Event] = []
    predicting(bench, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    bench.search(by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}), listener=events.append)
    begun = [event for event in events if isinstance(event, ProbeStarted)]
    explored = {event.config["micro_batch_size"]: event.expected_bytes for event in begun if not event.verifying}
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
    names = {"result": "result.yaml", "script": "train.py", "exports": "exports", "report": "report.html"}
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
    assert saved.hardware == {"device": "cpu", "name": "a CPU", "memory_gib": 8.0, "budget_gib": 1.0, "margin": 0.05}


def test_the_record_is_the_result_and_what_was_predicted_of_it(bench: Bench) -> None:
    predicting(bench, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, off=0.5)
    result = bench.search(by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 0.0}), seed=7)
    record = Record.load(bench.folder / "run" / "result.json")
    assert record.result == dataclasses.replace(result, search_seconds=round(result.search_seconds, 3))
    assert record.options["seed"] == 7
    sizes = [int(str(trial.config["micro_batch_size"])) for trial in result.trials]
    assert [each.allocated_bytes for each in record.predicted] == [size * MIB for size in sizes]
    assert not record.timelines  # the step could not be followed, and the search is not the worse for it


def test_a_report_that_cannot_be_drawn_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
    workload = dataclasses.replace(tiny.mlp_workload(8), name="my/model: 7b")
    result = bench.search(out=None, workload=workload)
    (run,) = (bench.folder / "autofit-runs").iterdir()
    assert result.run_directory == str(run)
    assert run.name.startswith("my-model-7b-20")


@pytest.mark.parametrize("named", [True, False], ids=["given", "default"])
def test_bad_input_leaves_no_run_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    monkeypatch.chdir(bench.folder)
    out = bench.folder / "run" if named else None
    with pytest.raises(InputError, match=r"unknown knob to search 'precison'\. Did you mean 'precision'"):
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
