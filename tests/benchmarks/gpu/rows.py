"""Rows as the stages of `benchmarks.gpu` store them, for tests of what is made of them."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autofit.cli import main
from autofit.probe import LocalExecutor
from benchmarks.gpu import bench as room
from benchmarks.gpu import loop, ranks, search
from benchmarks.gpu.bench import Bench, Ended
from benchmarks.gpu.store import Row, Store
from tests import warm
from tests.tiny import CPU

MIB = 2**20


def measurement(speed: float | None = 100.0, *, outcome: str = "fits", **peak: int | None) -> Row:
    """One of a probe: `speed` in tokens a second, of steps of 1000 tokens; peaks in MiB."""
    bytes_of = {name: None if size is None else size * MIB for name, size in peak.items()}
    step = 1000 / speed if speed else None
    return {
        "config": {"precision": "bf16"},
        "outcome": outcome,
        "reason": None if outcome == "fits" else "the reason",
        "tokens_per_second": speed,
        "samples_per_second": speed and speed / 10,
        "step_seconds": step and {"median": step, "low": step, "high": step},
        "peak_bytes": {"allocated": 100 * MIB, "reserved": None, "device": None, **bytes_of},
    }


def case(
    allocated: int = 100,
    *,
    low: int = 95,
    high: int = 105,
    step: float | None = 10.0,
    lever: str = "plain",
    **peak: Any,
) -> Row:
    """A measured row: what was predicted in MiB and seconds, and what was seen."""
    return {
        "model": peak.pop("model", "8B"),
        "technique": peak.pop("technique", "lora"),
        "lever": lever,
        "knobs": {},
        "estimate": {
            "allocated_bytes": allocated * MIB,
            "reserved_bytes": None,
            "device_bytes": {"low": low * MIB, "high": high * MIB},
            "step_seconds": step,
            "utilisation": 0.5,
        },
        "measurement": measurement(**peak),
    }


def with_executor(monkeypatch: pytest.MonkeyPatch, executor: LocalExecutor) -> None:
    """Every bench measures with this one, which none of them ends, and searches in this process;
    its ranks are warm."""
    monkeypatch.setattr(
        room, "LocalExecutor", lambda *_: mock.Mock(wraps=executor, close=lambda: None)
    )
    monkeypatch.setattr("autofit.tuning.measured.LocalExecutor", lambda *_: _lent(executor))
    monkeypatch.setattr(search, "python", _command)
    for stage, name in ((ranks, "real"), (loop, "hand_against_loop")):
        monkeypatch.setattr(stage, name, _with_warm_ranks(getattr(stage, name)))


def _with_warm_ranks(function: Callable[..., Row]) -> Callable[..., Row]:
    def call(*given: Any) -> Row:
        with warm.started_by("autofit.distributed.launcher"):
            return function(*given)

    return call


@contextlib.contextmanager
def _lent(executor: LocalExecutor) -> Iterator[LocalExecutor]:
    """The executor for one search, whose time limit does not hold for others."""
    try:
        yield executor
    finally:
        executor.end_by(math.inf)


def _command(arguments: list[str], seconds: float) -> Ended:
    assert arguments[:2] == ["-m", "autofit"]
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main(arguments[2:])
    return Ended(int(end.value.code or 0), out.getvalue(), err.getvalue())


def bench_in(folder: Path, *, smoke: bool = True) -> Bench:
    """A bench whose machine is described."""
    bench = Bench(Store(folder / "items.jsonl"), folder / "work", smoke)
    about = {
        "smoke": smoke,
        "hardware": CPU.to_dict(),
        "versions": {"torch": "2"},
        "driver": None,
        "begun": "today",
    }
    bench.store.add("about", "", about)
    bench.deadline = float("inf")
    return bench
