"""The record of a search: what was predicted of what was measured, and the steps that could be followed in time."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autofit.api.estimate import predict
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Note
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import search_options
from autofit.core.record import Predicted
from autofit.core.result import OnDevices, Result
from autofit.estimate.timeline import timelines
from autofit.hardware.catalogue import card, hardware_of
from autofit.search.predictions import Predictions
from autofit.techniques import canonicalize
from autofit.tuning.annotations import FOLLOW_SECONDS, Annotator, bottleneck_note, with_trace
from autofit.tuning.artifacts import make_record
from tests import tiny

WORKLOAD = tiny.llama_workload(4)
BEST = canonicalize({"precision": "fp32", "micro_batch_size": 4}, WORKLOAD, tiny.CPU)
LORA = canonicalize(
    {"precision": "bf16", "lora_rank": 4, "lora_targets": "all-linear"}, WORKLOAD, tiny.CPU
)
EXPECTED = Predictions({BEST: 5.0, LORA: math.nan}, {BEST: 2.0, LORA: math.nan})


class LocalExecutor:
    """Runs what it is given here, or fails as a child may."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.timeouts: list[float] = []

    def run(self, function: Any, workload: Any, *arguments: Any, log: str, timeout: float) -> Any:
        self.timeouts.append(timeout)
        if self.error:
            raise self.error
        if function is timelines:
            assert log == "timeline.log"
            # this process has threads, and must not be forked
            return timelines(workload, *arguments, processes=1)
        assert log == "devices.log"
        return function(workload, *arguments)


def found(stopped_by: str = "space") -> Result:
    full, lora = (
        Measurement(config, Outcome.FITS, number=place) for place, config in enumerate((BEST, LORA))
    )
    return Result(
        model="tiny",
        workload=WORKLOAD.summary(),
        source={},
        hardware=tiny.CPU,
        budget=Budget(GIB, GIB),
        versions={},
        best=full,
        tiers={"full": full, "lora": lora, "qlora": None},
        trials=(full, lora),
        skipped={},
        stopped_by=stopped_by,
        space_size=2,
        search_seconds=1.0,
    )


def record(
    result: Result, executor: Any, expected: Predictions | None = EXPECTED, **options: Any
) -> Any:
    checked = search_options(**options)
    timelines = Annotator(WORKLOAD, checked, executor).timelines(result)
    return make_record(result, checked, expected, timelines)


def test_the_best_of_each_tier_is_followed() -> None:
    executor = LocalExecutor()
    made = record(found(), executor, seed=5, set={"precision": ("fp32", "bf16")})
    assert {name: line.config for name, line in made.timelines.items()} == {
        "full": BEST,
        "lora": LORA,
    }
    assert made.predicted == (Predicted(5.0, 2.0), Predicted(None, None))
    assert executor.timeouts == [2 * FOLLOW_SECONDS]
    assert made.options["seed"] == 5
    assert made.options["set"] == {"precision": ("fp32", "bf16")}
    assert made.finished[:2] == "20"


def test_what_bounds_the_best_config_is_told() -> None:
    result = found()
    lines = record(result, LocalExecutor()).timelines
    words = {
        "compute": "arithmetic",
        "memory": "the device's memory",
        "transfer": "copies to and from the host",
    }
    for bottleneck, what in words.items():
        bound = {
            name: dataclasses.replace(line, bottleneck=bottleneck) for name, line in lines.items()
        }
        note = bottleneck_note(result, bound)
        assert note == f"By what is predicted, the best config is bound by {what}."
    assert bottleneck_note(result, {}) is None


class Recorder:
    """Stands for a child that writes down a step, or cannot."""

    def __init__(self, error: InputError | ProbeError | None = None) -> None:
        self.error = error
        self.asked: list[tuple[Config, Path]] = []

    def trace(
        self, workload: Any, config: Config, hardware: Any, budget: Budget, *, directory: Path
    ) -> dict[str, str]:
        self.asked.append((config, directory))
        if self.error:
            raise self.error
        return {"trace": str(directory / "t")}


def test_a_step_of_the_best_is_kept_among_the_files(tmp_path: Path) -> None:
    told: list[Any] = []
    executor: Any = Recorder()
    made = with_trace(found(), WORKLOAD, executor, directory=tmp_path, listener=told.append)
    assert executor.asked == [(BEST, tmp_path)]
    assert made.files == {"trace": str(tmp_path / "t")}
    assert made.to_json()["files"] == {
        **dict.fromkeys(("result", "script", "exports", "report")),
        "trace": str(tmp_path / "t"),
    }
    text = "memory snapshots need CUDA: on a CPU there is only the trace, which holds the allocations too."
    assert told == [Note(text)]


def test_a_step_that_cannot_be_recorded_costs_no_result(tmp_path: Path) -> None:
    told: list[Any] = []
    executor: Any = Recorder(ProbeError("its process ended."))
    assert (
        with_trace(found(), WORKLOAD, executor, directory=tmp_path, listener=told.append) == found()
    )
    assert told == [Note("no step of the best config could be recorded: its process ended.")]


def test_ctrl_c_while_a_step_is_recorded_ends_the_search_with_its_answer(tmp_path: Path) -> None:
    executor: Any = Recorder(KeyboardInterrupt())
    ended = with_trace(found(), WORKLOAD, executor, directory=tmp_path, listener=pytest.fail)
    assert ended == found("interrupt")


def test_little_time_is_spent_where_there_is_little() -> None:
    executor = LocalExecutor()
    record(found(), executor, time_limit=100)
    assert executor.timeouts == [5.0]


@pytest.mark.parametrize("error", [ProbeError("it took more than 60 s."), KeyboardInterrupt()])
def test_what_could_not_be_followed_is_left_out(error: BaseException) -> None:
    made = record(found(), LocalExecutor(error), expected=None)
    assert made.timelines == {}
    assert made.predicted == ()


def test_the_best_is_followed_on_other_numbers_of_devices() -> None:
    annotator = Annotator(WORKLOAD, search_options(), LocalExecutor())
    assert annotator.on_devices(found()) == ()  # a search over one
    several = dataclasses.replace(hardware_of(card("h100")), devices=2)
    config = canonicalize({"data_parallel": "fsdp", "micro_batch_size": 2}, WORKLOAD, several)
    best = Measurement(config, Outcome.FITS)
    result = dataclasses.replace(found(), hardware=several, best=best)
    followed = annotator.on_devices(result)
    assert [each.devices for each in followed] == [1, 2, 4]  # 4 samples do not divide among 8
    alone = predict(WORKLOAD, config, gpu="h100", devices=2).estimate
    assert followed[1] == OnDevices(2, alone.high, alone.tokens_per_second)
    assert None not in [each.rate for each in followed]
    too_slow = dataclasses.replace(annotator, executor=LocalExecutor(ProbeError("too slow")))
    assert too_slow.on_devices(result) == ()


def test_a_child_finds_the_layers_that_have_adapters() -> None:
    asked: list[str] = []

    def run(function: Any, workload: Any, config: Config, *, log: str, timeout: float) -> Any:
        asked.append(log)
        if config["precision"] == "fp32":
            raise ProbeError("it ended")
        return function(workload, config)

    executor: Any = SimpleNamespace(run=run)
    annotator = Annotator(WORKLOAD, search_options(time_limit=1), executor)
    adapted = dataclasses.replace(found(), best=Measurement(LORA, Outcome.FITS))
    layers = annotator.layers(adapted)
    assert layers
    assert "q_proj" in layers["targets"]
    assert annotator.layers(found()) is None  # without adapters no tool needs names
    other = dataclasses.replace(
        found(), best=Measurement(LORA.replace(precision="fp32"), Outcome.FITS)
    )
    assert annotator.layers(other) is None
    assert asked == ["layers.log"] * 2
