"""Memory from step to step: leaks and fragmentation are told once, noise and what fills up is not."""

import mmap
import random
from collections.abc import Callable, Iterable

import pytest
import torch

from autofit.core.hardware import GIB, MIB
from autofit.training import memory_watch
from autofit.training.build import build
from autofit.training.loop import StepReport, train
from autofit.training.memory_watch import MemoryWatch, StepMemory, memory_now
from tests import tiny

CPU = torch.device("cpu")


def told(monkeypatch: pytest.MonkeyPatch, readings: Iterable[StepMemory]) -> list[tuple[int, str]]:
    """What is told after which step of these readings."""
    said: list[tuple[int, str]] = []
    steps = list(readings)
    now = {"step": 0}
    watch = MemoryWatch(CPU, lambda text: said.append((now["step"], text)))
    monkeypatch.setattr(memory_watch, "memory_now", lambda device: steps[now["step"]])
    for step in range(len(steps)):
        now["step"] = step
        assert watch.after(step) is steps[step]
    return said


def tensors(sizes: Iterable[float]) -> list[StepMemory]:
    return [StepMemory(int(size), 40 * GIB, 39 * GIB, GIB) for size in sizes]


def resident(sizes: Iterable[float]) -> list[StepMemory]:
    return [StepMemory(resident_bytes=int(size)) for size in sizes]


@pytest.mark.parametrize("begins", range(20, 27))
@pytest.mark.parametrize("kind", [tensors, resident])
def test_a_leak_is_told_once_within_50_steps_of_its_beginning(
    begins: int,
    kind: Callable[[Iterable[float]], list[StepMemory]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(begins)
    noise = 0.0 if kind is tensors else 2 * MIB
    sizes = [GIB + max(0, step - begins) * MIB + noise * draw.random() for step in range(150)]
    ((step, text),) = told(monkeypatch, kind(sizes))
    assert step - begins < 50
    since, rate = text.split("since step ")[1].split(", by ")
    assert abs(int(since) - begins) <= 16
    assert float(rate.split()[0]) == pytest.approx(1.0, abs=0.2)


def test_a_slow_leak_in_noise_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    sizes = [GIB + step * MIB / 8 + 8 * MIB * draw.random() for step in range(800)]
    ((step, text),) = told(monkeypatch, resident(sizes))
    assert 50 < step < 500
    assert 0.06 < float(text.split(", by ")[1].split()[0]) < 0.25


NO_LEAKS: dict[str, Callable[[int, random.Random], float]] = {
    "level": lambda step, draw: 0.0,
    "noise": lambda step, draw: 64 * MIB * draw.random(),
    "a cache that fills": lambda step, draw: 512 * MIB * (1 - 0.9**step),
    "larger batches now and then": lambda step, draw: (
        256 * MIB * (step > 30) + 128 * MIB * (step > 90)
    ),
    "a few bytes": lambda step, draw: 4096 * step,
}


@pytest.mark.parametrize("shape", NO_LEAKS)
def test_what_is_no_leak_is_not_told(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    readings = [GIB + NO_LEAKS[shape](step, draw) for step in range(600)]
    assert told(monkeypatch, tensors(readings)) == []


def test_what_the_garbage_collector_frees_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    held, said = [0], []
    monkeypatch.setattr(
        memory_watch, "memory_now", lambda device: StepMemory(resident_bytes=GIB + held[0] * MIB)
    )
    monkeypatch.setattr(memory_watch.gc, "collect", lambda: held.__setitem__(0, 0))
    watch = MemoryWatch(CPU, said.append)
    for step in range(300):
        held[0] += 1
        watch.after(step)
    assert said == []


def test_fragmentation_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [StepMemory(GIB, 10 * GIB, 9 * GIB, GIB)] * 9 + [
        StepMemory(GIB, 14 * GIB, 9 * GIB, GIB)
    ] * 9
    ((step, text),) = told(monkeypatch, readings)
    assert step == 9
    assert "14.00 GiB for tensors that never took more than 9.00" in text


def test_cuda_is_asked_of_its_allocator_without_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {
        "allocated_bytes": {"all": {"current": 3, "peak": 5}},
        "reserved_bytes": {"all": {"current": 7, "peak": 8}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits"))
    memory = memory_now(torch.device("cuda", 0))
    assert (memory.allocated_bytes, memory.reserved_bytes, memory.peak_bytes) == (3, 7, 5)
    assert memory.resident_bytes


def test_a_real_leak_of_a_mib_a_step_is_told_within_50_steps() -> None:
    workload = tiny.mlp_workload()
    setup = build(workload, {}, tiny.CPU, model=tiny.living(workload))
    kept: list[mmap.mmap] = []
    said: list[str] = []

    def leak(report: StepReport) -> None:
        kept.append(mmap.mmap(-1, MIB))  # not of malloc, which may have as much left of other tests
        kept[-1].write(b"1" * MIB)

    batch = workload.batch(workload.effective_batch_size)
    reports = train(setup, [batch] * 50, steps=50, callbacks=[leak], listener=said.append)
    (text,) = said
    assert "the memory of this process has been rising since step " in text
    assert reports[-1].memory.resident_bytes
    assert reports[-1].memory.allocated_bytes is None  # a CPU's allocator does not count
