"""A search with several probes at a time: what its answer rests on, and what Ctrl-C leaves of it."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.events import Event, Note, ProbeStarted
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.options import search_options
from autofit.core.result import Result
from autofit.core.workload import Traits, Workload
from autofit.estimate.timeline import timelines
from autofit.probe import Executor, Place, Request, physical_cores
from autofit.tuning import measured as tune
from autofit.tuning import pipeline
from tests import tiny, warm
from tests.processes import descendants, number_in, wait_until, wait_until_gone

CARD = dataclasses.replace(
    tiny.CPU,
    device="cuda",
    name="NVIDIA H200",
    memory_bytes=140 * GIB,
    capability=(9, 0),
    context_bytes=GIB // 2,
)
CORES = [frozenset({each}) for each in range(8)]
TRAITS = Traits(
    parameters=1000,
    blocks=2,
    linears=4,
    attention=False,
    sdpa=False,
    batch_norm=False,
    dropout=False,
)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.probe.placement.physical_cores", lambda: CORES)


# A search whose probes are a formula


class Machine(Executor):
    """A machine that serves both executors: a step takes so long by micro-batch, `slower` in the pool."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware, self.traits = hardware, TRAITS
        self.seconds = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}
        self.pool: tuple[Place, ...] = ()
        self.explored: list[Config] = []
        self.verified: list[Config] = []
        self.predicts = False
        self.predicted_by_workers: list[bool] = []
        self.ended = False

    def close(self) -> None:
        pass

    def inspect(self, *_: object) -> tuple[Hardware, Traits]:
        return self.hardware, self.traits

    def idle_cards_like(self, hardware: Hardware, usable_bytes: int) -> list[str]:
        return ["0", "1"]

    def give_up(self) -> None:
        pass

    def run(
        self, function: Any, workload: Workload, *arguments: Any, log: str, timeout: float
    ) -> Any:
        if function is timelines:  # for the report, of the best config of every tier
            return []
        return self.predict(arguments[1], by_workers=False)

    def predict(self, configs: list[Config], *, by_workers: bool) -> Any:
        self.predicted_by_workers.append(by_workers)
        if not self.predicts:
            return [math.nan] * len(configs), [math.nan] * len(configs)
        return [float(MIB)] * len(configs), [self.step(config) for config in configs]

    def step(self, config: Config) -> float:
        return self.seconds[int(str(config["micro_batch_size"]))] * (
            0.9 if config["lora_rank"] else 1.0
        )

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        self.verified.append(request.config)
        return self.seen(request.config, self.step(request.config), number)

    def seen(self, config: Config, step: float, number: int) -> Measurement:
        times = StepSeconds(step, 0.99 * step, 1.01 * step)
        peak = PeakBytes(MIB)
        return Measurement(
            config,
            Outcome.FITS,
            number,
            times,
            samples_per_second=8 / step,
            peak_bytes=peak,
            seconds=1.0,
        )


class FakePool(Executor):
    """A pool on that machine, four times as slow."""

    def __init__(self, machine: Machine, places: tuple[Place, ...]) -> None:
        self.machine = machine
        self.places = len(places)
        machine.pool, machine.ended = places, False

    def close(self) -> None:
        self.machine.ended = True

    def give_up(self) -> None:
        self.machine.ended = True

    def run(
        self, function: Any, workload: Workload, *arguments: Any, log: str, timeout: float
    ) -> Any:
        return self.machine.predict(arguments[1], by_workers=True)

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        assert not self.machine.ended
        self.machine.explored.append(request.config)
        slower = 4.0 if self.machine.hardware.device == "cpu" else 1.0
        return self.machine.seen(request.config, slower * self.machine.step(request.config), number)


class Bench(SimpleNamespace):
    """A run directory and a machine to search on."""

    folder: Path
    machine: Machine

    def search(self, **options: Any) -> Result:
        listener: Callable[[Event], None] | None = options.pop("listener", None)
        given = {"space": str(self.folder / "space.yaml"), "out": self.folder / "run", **options}
        return pipeline.run_search(tiny.mlp_workload(8), search_options(**given), listener)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eight_cores: None) -> Iterator[Bench]:
    made = Bench(folder=tmp_path, machine=Machine(dataclasses.replace(tiny.CPU, cores=len(CORES))))
    monkeypatch.setattr(tune, "LocalExecutor", lambda logs, timeout: made.machine)
    monkeypatch.setattr(tune, "PoolExecutor", lambda places, *_: FakePool(made.machine, places))
    knobs = "  micro_batch_size: [1, 2, 4, 8]\n  lora_rank: [0, 8]\n  lora_targets: [all-linear]\n"
    (tmp_path / "space.yaml").write_text(f"description: for a test\nknobs:\n{knobs}")
    yield made


def test_workers_explore_and_what_may_be_the_best_is_verified_on_all_cores(bench: Bench) -> None:
    events: list[Event] = []
    result = bench.search(mem=1, workers=2, listener=events.append, tolerance=0.0, prefer="fast")
    machine = bench.machine
    assert [len(place.processors) for place in machine.pool] == [4, 4]
    assert len(machine.explored) == len(result.trials)
    assert machine.ended
    best = result.best
    assert best is not None
    assert best.verified
    assert best.config["micro_batch_size"] == 8
    assert best.step_seconds
    assert best.step_seconds.median == pytest.approx(0.9)  # not what a worker measures
    explored = next(each for each in result.trials if each.config == best.config)
    assert explored.step_seconds
    assert explored.step_seconds.median == pytest.approx(3.6)
    note = "2 probes run at a time, each on 4 of 8 cores"
    assert any(isinstance(event, Note) and event.text.startswith(note) for event in events)
    assert any("each on 4 of 8 cores" in each for each in result.to_json()["notes"])
    begun = [
        event.number for event in events if isinstance(event, ProbeStarted) and not event.verifying
    ]
    assert begun == list(range(len(result.trials)))


def test_the_best_of_every_tier_is_verified_on_all_cores(bench: Bench) -> None:
    machine = bench.machine
    result = bench.search(mem=1, workers=4, set={"micro_batch_size": [4, 8]})
    for name in ("full", "lora"):
        found = result.tiers[name]
        assert found is not None
        assert found.verified
        assert found.step_seconds
        assert found.step_seconds.median == pytest.approx(machine.step(found.config))


def test_the_best_of_a_tier_that_no_finalist_is_of_is_verified_all_the_same(bench: Bench) -> None:
    machine = bench.machine
    plain = machine.step
    machine.step = lambda config: plain(config) * (1.0 if config["lora_rank"] else 5.0)  # type: ignore[method-assign]
    result = bench.search(mem=1, workers=2, tolerance=0.01)
    full = result.tiers["full"]
    assert full is not None
    assert full.verified
    assert full.config["micro_batch_size"] == 8
    assert machine.verified[-1] == full.config


def test_what_was_only_explored_stands_on_the_frontier_at_the_pace_of_all_cores(
    bench: Bench,
) -> None:
    machine = bench.machine
    machine.seen = lambda config, step, number: dataclasses.replace(  # type: ignore[method-assign]
        Machine.seen(machine, config, step, number),
        peak_bytes=PeakBytes(MIB * int(str(config["micro_batch_size"]))),
    )
    points = bench.search(mem=1, workers=2).frontier["full"]
    assert [point.config["micro_batch_size"] for point in points] == [1, 2, 4, 8]
    for point in points:
        assert point.samples_per_second == pytest.approx(8 / machine.step(point.config), rel=1e-3)


def test_predictions_are_for_the_cores_that_probes_run_on_and_are_not_corrected_by_other_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[Any] = []
    bench.machine.predicts = True
    monkeypatch.setattr(tune, "learn", lambda *given: learnt.append(given))
    bench.search(mem=1, workers=2)
    assert bench.machine.predicted_by_workers == [True]
    assert not learnt
    bench.search(mem=1, out=bench.folder / "alone")
    assert bench.machine.predicted_by_workers == [True, False]
    assert len(learnt) == 1


def test_alone_nothing_is_started_beside_the_executor(bench: Bench) -> None:
    result = bench.search(mem=1)
    assert not bench.machine.explored
    assert not result.notes
    assert bench.search(mem=1, workers=1, out=bench.folder / "one").trials == result.trials


def test_no_more_workers_are_started_than_there_are_trials(bench: Bench) -> None:
    bench.search(mem=1, workers=4, trials=2)
    assert len(bench.machine.pool) == 2


def test_on_a_cpu_a_search_is_only_resumed_with_as_many_cores_for_each_probe(bench: Bench) -> None:
    bench.search(mem=1, workers=2, trials=2)
    with pytest.raises(InputError, match="cores_of_each_worker was 4, is 2"):
        bench.search(mem=1, workers=4, trials=4, resume=True)
    with pytest.raises(InputError, match="cores_of_each_worker was 4, is None"):
        bench.search(mem=1, trials=4, resume=True)
    assert len(bench.search(mem=1, workers=2, trials=4, resume=True).trials) == 4


def test_on_cards_a_search_is_resumed_with_as_many_workers_as_there_are_now(bench: Bench) -> None:
    bench.machine.hardware = CARD
    result = bench.search(gpu_mem=24, trials=2, tolerance=0.0)
    assert [place.card for place in bench.machine.pool] == ["0", "1"]
    (note,) = result.notes
    assert note.startswith("Little was seen of LoRA (0 good probes): ")
    assert (
        len(bench.search(gpu_mem=24, workers=1, trials=4, tolerance=0.0, resume=True).trials) == 4
    )


def test_later_searches_know_what_was_measured_on_as_many_cores(bench: Bench) -> None:
    bench.machine.traits = dataclasses.replace(TRAITS, fingerprint="of this model")
    known: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith("earlier searches measured"):
            known.append(event.text.split(":")[0])

    first = bench.search(mem=1, workers=2, tolerance=0.0, listener=listener)
    assert len(first.trials) == 8
    for folder, workers in (("again", 2), ("fewer", 4)):
        bench.search(mem=1, workers=workers, trials=1, out=bench.folder / folder, listener=listener)
    # with the same cores each; with others, nothing yet
    assert known == ["earlier searches measured 8 configs"]
    verified = len(set(bench.machine.verified))
    bench.search(mem=1, trials=1, out=bench.folder / "alone", listener=listener)
    assert known[1:] == [f"earlier searches measured {verified} configs"]


def test_an_interrupted_search_of_workers_answers_with_what_it_has(bench: Bench) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, ProbeStarted) and event.number == 3:
            raise KeyboardInterrupt

    result = bench.search(mem=1, workers=2, listener=interrupt)
    assert result.stopped_by == "interrupt"
    assert bench.machine.ended
    assert not bench.machine.verified
    assert 1 <= len(result.trials) <= 3


def test_an_interrupt_while_tiers_are_verified_keeps_the_best(bench: Bench) -> None:
    machine, begun = bench.machine, []
    plain = machine.step
    machine.step = lambda config: plain(config) * (1.0 if config["lora_rank"] else 5.0)  # type: ignore[method-assign]

    def interrupt(event: Event) -> None:
        if isinstance(event, ProbeStarted) and event.verifying and not event.config["lora_rank"]:
            begun.append(event)
            raise KeyboardInterrupt

    result = bench.search(mem=1, workers=2, tolerance=0.01, listener=interrupt)
    assert len(begun) == 1
    assert result.stopped_by == "interrupt"
    assert result.best is not None
    assert result.best.verified
    assert math.isclose(result.best.throughput, 8 / 0.9)


# And for real

WORKLOAD = """
import os
import time
from pathlib import Path

from tests import tiny
from autofit import Workload

FOLDER = Path({folder!r})
STARTED = FOLDER / "started"  # a list in memory would be put back between the calls of one proof

def is_told():
    return STARTED.exists() and str(os.getpid()) in STARTED.read_text().split()

def loss(model, batch):
    if not is_told():
        with STARTED.open("a") as file:
            file.write(f"{{os.getpid()}} {{sorted(os.sched_getaffinity(0))}}\\n")
        turn = len(STARTED.read_text().splitlines())
        if (FOLDER / "hang").exists() and turn > int((FOLDER / "hang").read_text()):
            (FOLDER / f"{{os.getpid()}}.hanging").write_text(f"{{os.getpid()}}\\n")
            time.sleep(600)
    return tiny.classify(model, batch)

def make():
    plain = tiny.mlp_workload(8)
    return Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=8)
"""
SETTINGS = ("precision=fp32", "optimizer=adamw", "attention=sdpa", "micro_batch_size=1,2,4,8")
# The model is a plain one.
COMMAND = """
import sys
from autofit.__main__ import main
from tests.probe.bare import bare
bare(lambda: main(sys.argv[1:]))
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return warm.python(
        [
            *("-c", COMMAND, "search"),
            *(
                "--model",
                str(folder / "mine.py:make"),
                "--device",
                "cpu",
                "--mem",
                "0.5",
                "--workers",
                "2",
            ),
            *("--trials", "5", "--out", str(folder / "run"), "--json", *settings),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


@pytest.mark.skipif(len(physical_cores()) < 2, reason="two workers need two cores")
def test_ctrl_c_ends_two_probes_on_cores_of_their_own_and_keeps_what_was_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD.format(folder=str(tmp_path)))
    (tmp_path / "hang").write_text("4")  # a look, a prediction and two probes go on
    search = start(tmp_path)
    # Three zygotes start one after the other where the machine is busy.
    wait_until(lambda: len(list(tmp_path.glob("*.hanging"))) == 2, "two probes hang", seconds=180.0)
    hanging = [number_in(path) for path in tmp_path.glob("*.hanging")]
    family = descendants(search.pid)
    assert set(hanging) < set(family)
    assert len(family) == 3 + 2  # zygotes, and the children of the workers'
    lines = [line.split(" ", 1) for line in (tmp_path / "started").read_text().splitlines()]
    cores = [json.loads(cores) for process, cores in lines if int(process) in hanging]
    assert [len(each) for each in cores] == [len(cores[0])] * 2
    assert not set(cores[0]) & set(cores[1])
    os.killpg(search.pid, signal.SIGINT)
    out, err = search.communicate()
    assert search.returncode == 130, err
    assert "Traceback" not in err
    wait_until_gone(family)
    interrupted = json.loads(out)
    assert interrupted["stopped_by"] == "interrupt"
    assert len(interrupted["trials"]) == 2
