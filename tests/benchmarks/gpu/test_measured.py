from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError, UntraceableError
from autofit.core.measurement import Measurement, Outcome, PeakBytes
from autofit.probe import Plan, Request
from benchmarks.gpu import measured
from benchmarks.gpu.bench import Bench, TimeUp
from benchmarks.gpu.cases import SMOKE
from benchmarks.gpu.measured import STAGE, counted, measure_all
from tests.benchmarks.gpu.rows import bench_in
from tests.tiny import llama_workload

CASES = SMOKE.mixed()


class Asked:
    """A LocalExecutor whose answers are these, by the knobs; what it was asked is kept."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.estimated: list[str] = []
        self.measured: list[str] = []

    def run(
        self, function: Any, workload: Any, knobs: Mapping[str, Any], *_: Any, **__: Any
    ) -> dict[str, Any]:
        name = _name(knobs)
        self.estimated.append(name)
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        low = answer if isinstance(answer, int) else 90
        return {
            "allocated_bytes": 100,
            "device_bytes": {"low": low, "high": low + 20},
            "step_seconds": None,
        }

    def measure(self, workload: Any, request: Request, **_: Any) -> Measurement:
        name = _name(request.config)
        self.measured.append(name)
        if self.answers.get(name) == "dies":
            raise ProbeError("the zygote is gone.")
        outcome = Outcome(self.answers.get(f"{name} ends", "fits"))
        return Measurement(request.config, outcome, reason="why", peak_bytes=PeakBytes(100))

    def hang_up(self) -> None:
        pass

    close = hang_up


def _name(knobs: Mapping[str, Any]) -> str:
    technique = (
        "qlora"
        if knobs.get("quantization", "none") != "none"
        else "lora"
        if knobs.get("lora_rank")
        else "full"
    )
    return (
        f"{technique}{knobs['micro_batch_size']}{knobs.get('activation_checkpointing', 'none')[0]}"
    )


def asked(folder: Path, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> tuple[Bench, Asked]:
    bench, executor = bench_in(folder), Asked(**answers)
    bench._executor = executor  # type: ignore[assignment]
    monkeypatch.setattr(measured, "LocalExecutor", lambda *_: executor)
    monkeypatch.setattr(Bench, "workload", lambda *_: llama_workload())
    return bench, executor


def test_each_is_estimated_before_it_is_measured_and_no_more_than_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, executor = asked(tmp_path, monkeypatch)
    measure_all(bench, CASES, wanted=2)
    assert (
        sorted(executor.estimated)
        == sorted(executor.measured)
        == sorted(_name(case.knobs) for case in CASES[:2])
    )
    row = bench.store.get(STAGE, CASES[0].key)
    assert row
    assert (row["estimate"]["allocated_bytes"], row["measurement"]["outcome"]) == (100, "fits")
    assert list(row).index("estimate") < list(row).index("measurement")


def test_a_second_call_goes_on_where_the_first_one_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, executor = asked(tmp_path, monkeypatch)
    monkeypatch.setattr(Bench, "need", lambda bench, _: bench_stops(executor))

    def bench_stops(executor: Asked) -> None:
        if len(executor.measured) == 2:
            raise TimeUp

    with pytest.raises(TimeUp):
        measure_all(bench, CASES, wanted=4)
    assert (len(executor.estimated), len(executor.measured)) == (4, 2)
    again, other = asked(tmp_path, monkeypatch)
    monkeypatch.setattr(Bench, "need", lambda *_: None)
    measure_all(again, CASES, wanted=4)
    assert other.estimated == []
    assert [*executor.measured, *other.measured] == [_name(case.knobs) for case in CASES[:4]]
    assert counted(again.store.rows(STAGE)) == 4


def test_what_cannot_be_measured_is_told_and_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [_name(case.knobs) for case in CASES[:5]]
    answers = {
        names[0]: InputError("no package."),
        names[1]: SMOKE_BYTES,
        names[2]: "dies",
        f"{names[3]} ends": "timed_out",
        names[4]: UntraceableError("it looks at numbers."),
    }
    bench, executor = asked(tmp_path, monkeypatch, **answers)
    monkeypatch.setattr(Bench, "drop_executor", lambda _: None)
    measure_all(bench, CASES, wanted=2)
    rows = [bench.store.get(STAGE, case.key) or {} for case in CASES[:5]]
    assert rows[0]["left_out"] == "no package."
    assert "more than 8 GiB" in rows[1]["left_out"]
    assert "the zygote is gone" in rows[2]["failed"]
    assert rows[3]["failed"] == "timed_out: why"
    assert "it looks at numbers" in rows[4]["not_estimated"]
    assert rows[4]["measurement"]["outcome"] == "fits"
    assert executor.measured[:3] == names[2:5]
    assert counted(bench.store.rows(STAGE)) == 2


SMOKE_BYTES = 9 * 2**30  # more than the machine of these tests has


def test_estimates_are_made_anew_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _ = asked(tmp_path, monkeypatch, **{_name(CASES[1].knobs): SMOKE_BYTES})
    measure_all(bench, CASES[:2])
    again, executor = asked(tmp_path, monkeypatch, **{_name(CASES[0].knobs): 95})
    measured.estimate_again(again)
    assert executor.measured == []
    first, second = (again.store.get(STAGE, case.key) or {} for case in CASES[:2])
    assert first["estimate"]["device_bytes"]["low"] == 95
    assert first["measurement"]["outcome"] == "fits"
    assert "left_out" not in second


def test_a_rehearsal_times_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    bench, executor = asked(tmp_path, monkeypatch)
    monkeypatch.setattr(
        Asked,
        "measure",
        lambda _, __, request, **___: (
            plans.append(request.plan) or Measurement(Config(), Outcome.FITS)
        ),
    )
    plan = Plan(min_steps=3, max_steps=50)
    for smoke in (True, False):
        measured.measured(
            replace(bench, smoke=smoke, _executor=executor),
            llama_workload(),
            Config(),
            Budget(1, 1),
            plan,
        )
    assert [each.max_steps for each in plans] == [3, 50]
