"""What a probe does between build and verdict, counted in this process instead of a child."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.distributed import Ranks
from autofit.hardware.tracker import StorageTracker
from autofit.probe import LocalExecutor, Plan, on_cpu, steps
from autofit.probe.measure import measure
from autofit.techniques import compile as compile_file
from autofit.training.inspect import inspect_workload
from tests import tiny

THREE = Plan(min_steps=3, max_steps=3)
WHOLE = Plan(min_steps=3, max_steps=3, compose=False)


def request(
    workload: Workload, *, plan: Plan = THREE, budget: int = GIB, **knobs: Any
) -> steps.Request:
    config = techniques.canonicalize(knobs, workload, tiny.CPU)
    return steps.Request(config, tiny.CPU, Budget(budget, GIB), plan)


def counting(workload: Workload, file: Path) -> Workload:
    """The same workload, whose loss adds the samples it gets to a file as a line."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with file.open("a") as out:
            out.write(f"{len(batch[0])}\n")
        return tiny.classify(model, batch)

    return Workload(
        model=workload.model,
        batch=workload.batch,
        loss=loss,
        effective_batch_size=workload.effective_batch_size,
    )


@pytest.mark.parametrize(
    ("micro_batch", "plan", "forwards"),
    [
        (1, THREE, 2 * 2 + 3 * 4),  # two warm-up steps of 2 micro-batches, three times 4 of the 16
        (1, WHOLE, 2 * 2 + 3 * 16),
        (4, THREE, 2 * 2 + 3 * 4),  # accumulation 4 is not composed
        (16, THREE, 2 * 1 + 3 * 1),
    ],
    ids=["composed", "finalist", "few micro-batches", "one micro-batch"],
)
def test_forwards_of_a_probe(
    executor: LocalExecutor, tmp_path: Path, micro_batch: int, plan: Plan, forwards: int
) -> None:
    workload = counting(tiny.mlp_workload(16), tmp_path / "samples")
    asked = request(workload, plan=plan, micro_batch_size=micro_batch)
    seen = executor.measure(workload, asked, number=0)
    assert seen.fits
    assert seen.steps == 3
    assert seen.composed == (micro_batch == 1 and plan.compose)
    assert (tmp_path / "samples").read_text().split() == [str(micro_batch)] * forwards


def test_the_first_step_is_taken_on_few_samples_of_a_loss_that_splits(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    workload = counting(tiny.mlp_workload(16), tmp_path / "samples")
    whole = executor.measure(workload, request(workload, plan=THREE, micro_batch_size=8), number=0)
    (tmp_path / "samples").unlink()
    inspected = dataclasses.replace(workload, traits=inspect_workload(workload, tiny.CPU, 2**30))
    (tmp_path / "samples").unlink()
    seen = executor.measure(inspected, request(inspected, plan=THREE, micro_batch_size=8), number=1)
    assert (tmp_path / "samples").read_text().split() == ["2", *["8"] * (2 + 3 * 2)]
    assert seen.peak_bytes and whole.peak_bytes
    assert seen.peak_bytes.allocated == whole.peak_bytes.allocated


@pytest.mark.parametrize(
    "knobs",
    [
        {"optimizer": "adamw-foreach"},
        {"optimizer": "adamw-8bit", "activation_checkpointing": "full"},
        {"optimizer_in_backward": True, "micro_batch_size": 8},
        {"lora_rank": 4, "quantization": "nf4", "loss": "chunked"},
        {"precision": "bf16-mixed", "activation_checkpointing": "selective"},
    ],
    ids=["all weights at once", "8-bit state", "in backward", "quantised", "mixed"],
)
def test_a_first_step_on_few_samples_changes_no_peak(
    executor: LocalExecutor, knobs: dict[str, Any]
) -> None:
    workload = tiny.llama_workload(8)
    asked = request(workload, **{"micro_batch_size": 4, **knobs})
    inspected = dataclasses.replace(workload, traits=inspect_workload(workload, tiny.CPU, GIB))
    whole, seen = (
        executor.measure(each, asked, number=0).peak_bytes for each in (workload, inspected)
    )
    assert whole and seen
    assert seen.allocated == whole.allocated


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No resource limit on the process of the tests."""
    monkeypatch.setattr(on_cpu, "guard_cpu", lambda budget: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, unguarded: None) -> Iterator[Counter[str]]:
    """How often each part of a step is called."""
    counter: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(steps, name)

        def call(*arguments: Any) -> Any:
            counter[name] += 1
            return original(*arguments)

        return call

    for name in ("accumulate", "update", "train_step"):
        monkeypatch.setattr(steps, name, counted(name))
    yield counter


def timed_as(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Whatever is timed takes the given seconds, in turn."""
    given = list(seconds)

    def timed(self: Any, _: object, action: Callable[[], Any]) -> float:
        action()
        given.append(given.pop(0))
        return given[-1]

    monkeypatch.setattr(steps.Probe, "_seconds", timed)


def test_a_composed_step_is_four_micro_batches_scaled_up_and_one_update(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    timed_as(monkeypatch, 0.4, 0.1)
    workload = tiny.mlp_workload(16)
    seen = measure(workload, request(workload, micro_batch_size=1))
    assert seen.step_seconds
    assert seen.step_seconds.median == pytest.approx(0.4 * 16 / 4 + 0.1)
    assert seen.samples_per_second == pytest.approx(16 / 1.7)
    assert calls == {"accumulate": 2 + 3, "update": 2 + 3}


def test_a_whole_step_is_the_loops_own(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    timed_as(monkeypatch, 0.5)
    workload = tiny.mlp_workload(16)
    seen = measure(workload, request(workload, micro_batch_size=1, plan=WHOLE))
    assert seen.step_seconds
    assert seen.step_seconds.median == 0.5
    assert calls == {"accumulate": 2, "update": 2, "train_step": 3}


def test_over_budget_nothing_is_timed(calls: Counter[str]) -> None:
    workload = tiny.mlp_workload()
    fitting = measure(workload, request(workload))
    assert fitting.peak_bytes
    calls.clear()
    seen = measure(workload, request(workload, budget=fitting.peak_bytes.allocated - 1))
    assert seen.outcome is Outcome.OUT_OF_MEMORY
    assert seen.steps == 0
    assert seen.step_seconds is None
    assert calls == {"accumulate": 2, "update": 2}


def test_no_step_needs_more_memory_than_the_two_micro_batches_of_the_warm_up(
    unguarded: None,
) -> None:
    """Else the peak would depend on how many micro-batches are tried."""
    workload = tiny.mlp_workload(8)
    setup = steps.build(workload, request(workload, micro_batch_size=1).config, tiny.CPU)
    batch = workload.batch(8)
    peaks = []
    for micro_batches in (2, 8):
        with StorageTracker() as tracker:
            tracker.see([*setup.model.parameters(), *setup.model.buffers()])
            part = steps.samples_of(batch, 0, micro_batches)
            for _ in range(2):
                steps.train_step(setup, part)
        peaks.append(tracker.peak)
    assert peaks[0] == peaks[1]


def test_hopelessly_slow_ones_stop_after_two_steps(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    timed_as(monkeypatch, 0.5)
    workload = tiny.mlp_workload()
    seen = measure(workload, request(workload, plan=Plan(best_seconds=0.2)))
    assert seen.fits
    assert seen.steps == calls["train_step"] == 2
    assert "far slower" in (seen.reason or "")


def test_a_scaler_that_skips_its_first_steps_has_not_diverged(calls: Counter[str]) -> None:
    """The first scale is 65536; times a loss in the thousands that is more than fp16 can hold."""
    plain = tiny.mlp_workload()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return tiny.classify(model, batch) * 1000

    workload = Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)
    seen = measure(workload, request(workload, precision="fp16-mixed"))
    assert seen.fits
    assert calls["update"] > 5


def test_a_scaler_that_always_skips_has(calls: Counter[str]) -> None:
    plain = tiny.mlp_workload()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        zero = sum((each - each.detach()).square().sum() for each in model.parameters())
        return tiny.classify(model, batch) + zero.sqrt()  # finite, but its slope at 0 is not

    workload = Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)
    seen = measure(workload, request(workload, precision="fp16-mixed"))
    assert seen.outcome is Outcome.DIVERGED
    assert "scaler skipped 50 steps" in (seen.reason or "")
    assert seen.loss
    assert math.isfinite(seen.loss)


def test_warnings_of_the_build_are_kept(unguarded: None) -> None:
    workload = tiny.conv_workload()
    seen: Measurement = measure(workload, request(workload, micro_batch_size=2))
    assert any("BatchNorm" in warning for warning in seen.warnings)


def test_an_answer_crosses_processes_whole(executor: LocalExecutor) -> None:
    """What a child says is the same as what is computed here: nothing is lost on the way."""
    workload = tiny.llama_workload()
    asked = request(workload, micro_batch_size=2)
    there = executor.measure(workload, asked, number=5)
    again = Measurement.from_trial(there.to_trial())
    assert again == there


def test_compiling_is_measured_apart(monkeypatch: pytest.MonkeyPatch, unguarded: None) -> None:
    monkeypatch.setattr(compile_file, "BACKEND", "aot_eager")
    workload = tiny.transformer_workload(4)
    plain = measure(workload, request(workload))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seen = measure(workload, request(workload, compile="default"))
    assert seen.fits, seen.reason
    # nothing kept it from compiling
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert 0 < seen.compile_seconds < seen.warmup_seconds
    assert plain.compile_seconds == 0
    assert seen.peak_bytes and plain.peak_bytes
    assert seen.peak_bytes.allocated == pytest.approx(plain.peak_bytes.allocated, rel=0.1)
    again = Measurement.from_trial(seen.to_trial())
    assert again.compile_seconds == seen.compile_seconds


def test_a_compiled_run_over_budget_is_told_so_after_its_warm_up(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    monkeypatch.setattr(compile_file, "BACKEND", "aot_eager")
    workload = tiny.transformer_workload(4)
    seen = measure(workload, request(workload, budget=100_000, compile="default"))
    assert seen.outcome is Outcome.OUT_OF_MEMORY
    assert seen.peak_bytes
    assert seen.peak_bytes.allocated > 400_000
    assert calls == {"accumulate": 2, "update": 2}


def test_seconds_that_a_step_spends_compiling_are_not_its_own(
    monkeypatch: pytest.MonkeyPatch, unguarded: None
) -> None:
    workload = tiny.mlp_workload()
    probe = on_cpu.CpuProbe(workload, request(workload, compile="default"))
    spent = iter((10.0, 13.0))
    clock = iter((100.0, 105.0))
    monkeypatch.setattr(probe, "_compiled", lambda: next(spent))
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(clock))
    alone: Any = SimpleNamespace(ranks=Ranks())
    assert probe._seconds(alone, lambda: None) == 2.0


def test_the_resident_peak_is_of_this_process() -> None:
    before = steps.peak_resident_bytes()
    assert before > 10 * MIB
    free = before - psutil.Process().memory_info().rss  # of what it once held
    block = bytearray(b"x") * (free + 256 * MIB)
    grown = steps.peak_resident_bytes()
    assert before + 128 * MIB < grown < before + 384 * MIB
    del block
    assert steps.peak_resident_bytes() >= grown
