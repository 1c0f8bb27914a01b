"""What every executor must do. A new one adds its factory to `FACTORIES`, and passes. Ray takes part twice: within this
process, and on real nodes by `pytest -m cluster -n 0 tests/probe/executors`."""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.probe import (
    Executor,
    GangExecutor,
    LocalExecutor,
    Place,
    Plan,
    PoolExecutor,
    RayExecutor,
    Request,
)
from tests import tiny
from tests.probe.bare import bare
from tests.probe.executors.fake_ray import FakeRay
from tests.probe.executors.real_ray import cluster
from tests.processes import number_in, wait_until, wait_until_gone

PROCESSORS = sorted(os.sched_getaffinity(0))
# A core of its own each; on a machine of one core both have that. No CPU minds which card it may see.
PLACES = [
    Place(
        number,
        card=str(7 + number),
        processors=frozenset({PROCESSORS[number % len(PROCESSORS)]}),
        cores=1,
    )
    for number in range(2)
]
REAL = "ray, on real nodes"
FACTORIES: dict[str, Callable[[Path], Executor]] = {
    "local": lambda logs: bare(lambda: LocalExecutor(logs, timeout=120.0)),
    "pool": lambda logs: bare(lambda: PoolExecutor(PLACES, logs, 120.0)),
    "gang": lambda logs: bare(lambda: GangExecutor(PLACES, logs, 120.0)),
    "ray": lambda logs: on_ray(logs),
    "ray, of gangs": lambda logs: on_ray(logs, nodes=2),
    REAL: lambda logs: RayExecutor(search_options(device="cpu", probe_timeout=120.0), logs),
}


def on_ray(logs: Path, **options: Any) -> Executor:
    with FakeRay(a={"CPU": 1.0}, b={"CPU": 1.0}).installed():
        return RayExecutor(search_options(device="cpu", probe_timeout=120.0, **options), logs)


def doing(action: Callable[[], object]) -> Workload:
    """Training whose loss does `action` first."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        action()
        return tiny.classify(model, batch)

    plain = tiny.mlp_workload()
    return Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)


def measure(executor: Executor, workload: Workload, number: int = 0) -> Measurement:
    hardware = tiny.CPU.of_several(executor.devices)
    config = techniques.canonicalize({}, workload, hardware)
    request = Request(config, hardware, Budget(GIB, 4 * GIB), Plan(min_steps=2, max_steps=2))
    return executor.measure(workload, request, number=number)


def fail() -> None:
    raise ValueError("bad luck")


def hanging(folder: Path) -> Workload:
    """Training that never ends, and writes its process id to a file first."""

    def hang() -> None:
        (folder / f"{os.getpid()}.hangs").write_text(f"{os.getpid()}\n")
        time.sleep(600)

    return doing(hang)


def hung(folder: Path, count: int) -> list[int]:
    """The processes that hang, once there are so many."""
    wait_until(lambda: len(list(folder.glob("*.hangs"))) == count, f"{count} probes hang")
    return [number_in(path) for path in folder.glob("*.hangs")]


# A gang is one wherever its ranks are.
MARKS = {"ray, of gangs": pytest.mark.slow, REAL: pytest.mark.cluster}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in FACTORIES]
)
def factory(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Executor]]:
    """Makes one that writes its logs to a folder."""
    with cluster(2) if request.param == REAL else contextlib.nullcontext():
        yield FACTORIES[request.param]


@pytest.fixture(scope="module")
def executor(
    factory: Callable[[Path], Executor], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executor]:
    """One executor for all tests that leave it in working order."""
    with factory(tmp_path_factory.mktemp("logs")) as executor:
        yield executor


def test_as_many_configs_as_it_has_places_are_measured_at_once(
    executor: Executor, tmp_path: Path
) -> None:
    folder, places = str(tmp_path), executor.places

    def meet() -> None:
        told = (os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))
        place = [sorted(os.sched_getaffinity(0)), torch.get_num_threads(), *told]
        Path(folder, f"{os.getpid()}").write_text(json.dumps(place))
        while len(list(Path(folder).iterdir())) < places:
            time.sleep(0.01)

    workload = doing(meet)
    with ThreadPoolExecutor(places) as threads:
        found = list(threads.map(lambda number: measure(executor, workload, number), range(places)))
    assert [(each.outcome, each.number) for each in found] == [
        (Outcome.FITS, number) for number in range(places)
    ]
    assert all(each.step_seconds and each.seconds > 0 for each in found)

    if isinstance(executor, PoolExecutor):  # each in its own place
        seen = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        assert sorted(seen, key=lambda place: place[2]) == [
            [sorted(place.processors), 1, place.card, "1"] for place in PLACES
        ]
        assert sorted(os.sched_getaffinity(0)) == PROCESSORS


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (lambda: os._exit(7), Outcome.FAILED),
        (lambda: sys.exit("I quit"), Outcome.FAILED),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), Outcome.HOST_OUT_OF_MEMORY),
        (lambda: bytearray(4 << 30), Outcome.OUT_OF_MEMORY),
    ],
    ids=["exits", "raises", "killed", "out of memory"],
)
def test_a_config_that_ends_badly_costs_only_itself(
    executor: Executor, action: Callable[[], object], outcome: Outcome
) -> None:
    assert measure(executor, doing(action)).outcome is outcome
    assert measure(executor, tiny.mlp_workload()).outcome is Outcome.FITS


def test_a_function_that_overruns_is_ended(executor: Executor, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def sleep(_: Workload | None) -> None:
        (Path(folder) / "child").write_text(f"{os.getpid()}\n")
        time.sleep(600)

    with pytest.raises(ProbeError, match="sleeping took more than 1 s"):
        executor.run(sleep, None, log="sleep.log", timeout=1.0, task="sleeping")
    wait_until_gone([number_in(tmp_path / "child")])
    assert executor.run(lambda _, number: number + 1, None, 1, log="sum.log", timeout=60.0) == 2


def test_errors_keep_their_kind(executor: Executor) -> None:
    def raising(error: type[Exception]) -> Callable[[Workload | None], None]:
        def function(_: Workload | None) -> None:
            raise error("it is wrong.")

        return function

    for error in (InputError, ProbeError):
        with pytest.raises(error, match="it is wrong"):
            executor.run(raising(error), None, log="errors.log", timeout=60.0)
    with pytest.raises(ProbeError, match=r"asking ended its process: exit code 1"):
        executor.run(raising(ValueError), None, log="errors.log", timeout=60.0, task="asking")


def test_a_workload_that_cannot_be_sent_is_the_users_error(executor: Executor) -> None:
    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be sent to a probe process") as caught:
        measure(executor, doing(lock.acquire))
    assert "locks" in caught.value.remedy


def test_it_finds_the_hardware_and_the_traits(executor: Executor) -> None:
    hardware, traits = executor.inspect(tiny.transformer_workload(), "cpu", GIB)
    assert (hardware.device, traits.blocks) == ("cpu", 3)
    assert executor.detect("cpu").name == hardware.name


def test_whatever_it_runs_ends_when_time_is_over(executor: Executor) -> None:
    began = time.monotonic()
    executor.end_by(began + 1.0)
    try:
        with pytest.raises(
            ProbeError, match=r"looking at the model took more than [01] s"
        ) as caught:
            executor.inspect(doing(lambda: time.sleep(600)), "cpu", GIB)
    finally:
        executor.end_by(math.inf)
    assert "time limit" in caught.value.remedy
    assert time.monotonic() - began < 30  # a busy machine may take its time
    assert executor.detect("cpu").device == "cpu"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Whatever runs the tests may have another handler, or none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_comes_through_and_giving_up_frees_everyone_else_who_waits(
    executor: Executor, tmp_path: Path, ctrl_c: None
) -> None:
    """The last one that the tests' shared executor serves: it has ended then."""
    workload, places = hanging(tmp_path), executor.places
    waiting: list[Future[Measurement]] = []

    def press() -> None:
        hung(tmp_path, executor.devices)  # what the main thread waits for
        # one more than there are places waits for its turn
        numbers = range(1, places + 1)
        waiting.extend(threads.submit(measure, executor, workload, each) for each in numbers)
        hung(tmp_path, places * executor.devices)
        # which also ends a wait for an answer
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(places + 1) as threads:
        presser = threads.submit(press)
        with pytest.raises(KeyboardInterrupt):
            measure(executor, workload)
        presser.result()
        executor.give_up()
        assert all(isinstance(each.exception(timeout=60), ProbeError) for each in waiting)

    with pytest.raises(ProbeError):  # nor does anything start later
        measure(executor, workload)
    executor.close()
    executor.close()
    executor.give_up()
    wait_until_gone(number_in(path) for path in tmp_path.glob("*.hangs"))


def test_an_executor_that_still_starts_is_closed_at_once(
    factory: Callable[[Path], Executor], tmp_path: Path
) -> None:
    executor = factory(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(measure, executor, tiny.mlp_workload())
        start = time.monotonic()
        executor.close()
        assert isinstance(waiting.exception(timeout=60), ProbeError)
    assert time.monotonic() - start < 30
