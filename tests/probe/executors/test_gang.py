"""The gang: ranks that measure one config together, and end by the cause of the one that does not go on."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.probe import GangExecutor, Plan, Request
from tests import tiny, warm
from tests.probe.bare import bare
from tests.probe.executors.test_conformance import PLACES, fail, hanging, hung
from tests.processes import wait_until, wait_until_gone

TWO = tiny.CPU.of_several(2)


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangExecutor]:
    """For all these tests, whatever happens to its ranks."""
    with bare(lambda: GangExecutor(PLACES, tmp_path_factory.mktemp("gang"), 120.0)) as gang:
        yield gang


def stores(process: int) -> list[Path]:
    """The files where ranks of a process's gangs meet."""
    return list(Path(tempfile.gettempdir()).glob(f"autofit-ranks-{process}-*"))


@pytest.fixture(autouse=True)
def leaves_nothing(gang: GangExecutor) -> Iterator[None]:
    """Neither children of the zygotes nor the file where ranks met."""
    yield
    assert not [
        child
        for worker in gang._workers
        for child in psutil.Process(worker._process.pid).children()
    ]
    assert not stores(os.getpid())


def measure(
    gang: GangExecutor,
    workload: Workload,
    knobs: Mapping[str, Any] | None = None,
    budget: int = GIB,
    number: int = 0,
) -> Measurement:
    config = techniques.canonicalize(knobs or {}, workload, TWO)
    request = Request(config, TWO, Budget(budget, 8 * GIB), Plan(min_steps=2, max_steps=3))
    return gang.measure(workload, request, number=number)


def on_rank_1(action: Callable[[], object]) -> Workload:
    """Training in which rank 1 does something in its third loss."""
    plain, calls = tiny.mlp_workload(), [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        if os.environ["RANK"] == "1" and calls[0] == 3:
            action()
        return tiny.classify(model, batch)

    return Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_is_measured_is_of_all_ranks(gang: GangExecutor, kind: str) -> None:
    found = measure(
        gang, tiny.transformer_workload(), {"data_parallel": kind, "micro_batch_size": 1}, number=3
    )
    assert (found.outcome, found.number, found.reason) == (Outcome.FITS, 3, None)
    assert found.config["gradient_accumulation_steps"] == 2
    assert found.step_seconds
    assert found.samples_per_second == pytest.approx(4 / found.step_seconds.median)
    assert found.peak_bytes
    assert found.peak_bytes.allocated > 100_000
    assert {"0003.log", "0003-rank-1.log"} <= {
        path.name for path in gang._workers[0].logs.iterdir()
    }


def test_each_rank_sees_its_part_of_the_batch_and_the_slowest_counts(gang: GangExecutor) -> None:
    plain = tiny.mlp_workload()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert len(batch[0]) == 2
        time.sleep(0.05 if os.environ["RANK"] == "1" else 0.0)
        return tiny.classify(model, batch)

    found = measure(
        gang, Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)
    )
    assert found.fits, found.reason
    assert found.step_seconds
    assert found.step_seconds.low > 0.05


def test_the_link_between_the_ranks_is_measured(gang: GangExecutor) -> None:
    link = gang.link(TWO, Budget(GIB, 8 * GIB))
    assert link
    assert link.bandwidth > 1e6
    assert 0 <= link.latency < 1


def test_a_step_is_recorded_on_all_ranks(gang: GangExecutor, tmp_path: Path) -> None:
    workload = tiny.mlp_workload()
    config = techniques.canonicalize({}, workload, TWO)
    found = gang.trace(workload, config, TWO, Budget(GIB, 8 * GIB), directory=tmp_path)
    assert found["trace"] == str(tmp_path / "step_trace.json.gz")
    assert all(Path(path).exists() for path in found.values())
    assert (tmp_path / "step_trace.json.gz").stat().st_size > 1000
    assert (tmp_path / "rank-1" / "step_trace.json.gz").exists()
    crashing = on_rank_1(lambda: os._exit(7))
    with pytest.raises(ProbeError, match=r"rank [01] of 2 did not end its step"):
        gang.trace(crashing, config, TWO, Budget(GIB, 8 * GIB), directory=tmp_path)


FAULTS: dict[str, tuple[Callable[[], object], Outcome, str]] = {
    "raises": (fail, Outcome.FAILED, "ValueError: bad luck"),
    "exits": (lambda: os._exit(7), Outcome.FAILED, "exit code 7"),
    "is killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        Outcome.HOST_OUT_OF_MEMORY,
        "killed the process",
    ),
    "is out of memory": (
        lambda: torch.empty(int(1.6 * GIB), dtype=torch.uint8),
        Outcome.OUT_OF_MEMORY,
        "needs more than 1.00 GiB",
    ),
    "lacks host memory": (
        lambda: bytearray(1 << 60),
        Outcome.OUT_OF_MEMORY,
        "ran into the resource limit",
    ),
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_that_fails_ends_all_with_its_own_cause(gang: GangExecutor, how: str) -> None:
    action, outcome, words = FAULTS[how]
    found = measure(gang, on_rank_1(action))
    assert found.outcome is outcome
    assert found.reason
    assert found.reason.startswith("rank 1 of 2: ")
    assert words in found.reason
    assert found.seconds < 30  # nobody waits for the group's timeout


def test_the_rank_that_needs_most_is_named(gang: GangExecutor) -> None:
    plain = tiny.mlp_workload()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.empty(50_000 * (2 + int(os.environ["RANK"])), dtype=torch.uint8)
        return tiny.classify(model, batch)

    workload = Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)
    fits = measure(gang, workload)
    assert fits.peak_bytes
    found = measure(gang, workload, budget=fits.peak_bytes.allocated - 10_000)
    assert found.outcome is Outcome.OUT_OF_MEMORY
    assert found.peak_bytes
    # gloo's own come and go
    assert found.peak_bytes.allocated == pytest.approx(fits.peak_bytes.allocated, abs=1000)
    assert found.reason
    assert found.reason.startswith("rank 1 of 2: needs ")
    assert found.step_seconds is None


@pytest.mark.parametrize(
    ("action", "outcome", "words"),
    [
        (
            lambda: time.sleep(600),
            Outcome.TIMED_OUT,
            "rank 1 of 2 hangs: the others waited for it in _backward (strategy.py:",
        ),
        (
            lambda: torch.distributed.barrier(),
            Outcome.FAILED,
            "the ranks waited for each other: rank 0 in _backward (strategy.py:",
        ),
    ],
    ids=["hangs", "is out of step"],
)
def test_a_rank_that_others_wait_for(
    gang: GangExecutor, monkeypatch: pytest.MonkeyPatch, action: Any, outcome: Outcome, words: str
) -> None:
    monkeypatch.setattr(gang, "timeout", 9.0)  # a third of it for one rank to wait for another
    monkeypatch.setattr(gang, "_probes", 1)
    found = measure(gang, on_rank_1(action))
    assert found.outcome is outcome, found.reason
    assert found.reason
    assert found.reason.startswith(words)


def test_what_all_ranks_say_names_none(gang: GangExecutor) -> None:
    plain = tiny.mlp_workload()
    workload = Workload(
        model=plain.model,
        batch=plain.batch,
        loss=lambda model, batch: tiny.classify(model, batch) * torch.nan,
        effective_batch_size=4,
    )
    found = measure(gang, workload)
    assert (found.outcome, found.reason) == (Outcome.DIVERGED, "the loss is nan")


def hang_and_be_killed(folder: Path) -> None:
    def kill() -> None:
        hung(folder, 2)
        os.kill(os.getpid(), signal.SIGKILL)

    with bare(lambda: GangExecutor(PLACES, folder, 120.0)) as own:
        threading.Thread(target=kill).start()
        measure(own, hanging(folder))


def test_of_a_caller_that_is_killed_nothing_is_left(tmp_path: Path) -> None:
    code = "import sys; from tests.probe.executors.test_gang import *; hang_and_be_killed(Path(sys.argv[1]))"
    caller = warm.python(["-c", code, str(tmp_path)], cwd=Path(__file__).parents[3])
    assert caller.wait() == -signal.SIGKILL
    wait_until_gone(hung(tmp_path, 2))
    wait_until(lambda: not stores(caller.pid), "the file where they met is deleted")


def test_ranks_of_one_gang_do_not_meet_those_of_another(tmp_path: Path) -> None:
    gangs = [GangExecutor([], tmp_path, 1.0) for _ in range(2)]
    one, other = (gang.meeting()[1] for gang in gangs)
    assert one != other


def test_ranks_meet_where_the_directory_of_temporary_files_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    _, store = GangExecutor([], tmp_path, 1.0).meeting()
    assert Path(store or "").parent.is_dir()


def test_what_a_zygote_leaves_behind_that_hangs_is_deleted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with GangExecutor([], tmp_path, 1.0) as executor:
        _, store = executor.meeting()
        Path(store or "").touch()
    assert not list(tmp_path.iterdir())
