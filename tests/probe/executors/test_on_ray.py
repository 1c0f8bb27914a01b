"""Probes on a Ray cluster: what a lost node costs, and, where Ray is installed, all of it on real nodes."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import autofit
from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import ProbeError
from autofit.core.events import Event, ProbeFinished, ProbeStarted
from autofit.core.hardware import GIB
from autofit.core.measurement import Outcome
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.probe import Plan, RayExecutor, Request
from autofit.probe.executors.cluster import Gang
from autofit.probe.executors.far import LostError
from tests import tiny
from tests.probe.executors.fake_ray import FakeRay
from tests.probe.executors.real_ray import SMALL, cluster
from tests.probe.executors.test_conformance import doing, fail, hanging, hung, measure
from tests.probe.executors.test_pool import Counting, side_by_side
from tests.processes import DEADLINE, alive, descendants, wait_until, wait_until_gone


def test_a_probe_whose_node_dies_is_done_again_elsewhere(tmp_path: Path) -> None:
    """With what it has measured, the log included; and what it leaves of the cluster when it explored."""
    ray, notes = FakeRay(a={"CPU": 1.0}, b={"CPU": 1.0}), list[str]()
    with ray.installed():
        executor = RayExecutor(
            search_options(device="cpu", probe_timeout=120.0), tmp_path, notes.append
        )
    with executor, ThreadPoolExecutor(1) as threads:
        with executor.explorer() as explorer:
            asked = threads.submit(measure, explorer, hanging(tmp_path))
            first = hung(tmp_path, 1)
            ray.lose(ray.actors[-1].node)
            wait_until(lambda: len(list(tmp_path.glob("*.hangs"))) == 2, "it runs elsewhere")
            wait_until_gone(first)
            assert notes == [
                "a node of the cluster was lost. What ran there is done again elsewhere."
            ]
            explorer.give_up()
            assert isinstance(asked.exception(timeout=60), ProbeError)
        # which was not given up
        assert measure(executor, tiny.mlp_workload(), number=7).outcome is Outcome.FITS
        paths = executor.trace(
            tiny.mlp_workload(), techniques.canonicalize({}, tiny.mlp_workload(), tiny.CPU), tiny.CPU,
            Budget(GIB, 4 * GIB), directory=tmp_path / "trace",
        )  # fmt: skip
        assert Path(paths["trace"]) == tmp_path / "trace" / "step_trace.json.gz"
        assert all(Path(path).stat().st_size for path in paths.values())
    assert not ray.groups
    assert all(actor.dead for actor in ray.actors)


def cluster_of(gang: Gang, end: Callable[[Any], None], *, shares_nodes: bool = False) -> Any:
    """A cluster that has one gang, as often as it is asked for."""
    given = {
        "world": 1,
        "processors": 1,
        "sharing": 1,
        "free_slots": lambda: 2,
        "give_back": lambda _: None,
    }
    return SimpleNamespace(
        **given, take=lambda _: dataclasses.replace(gang), end=end, shares_nodes=shares_nodes
    )


@pytest.mark.parametrize(
    ("optimizer", "shares_nodes", "at_once"),
    [("adamw", True, 2), ("paged-adamw-8bit", True, 1), ("paged-adamw-8bit", False, 2)],
)
def test_what_keeps_something_on_the_host_is_measured_one_at_a_time_on_a_node(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    optimizer: str,
    shares_nodes: bool,
    at_once: int,
) -> None:
    monkeypatch.setattr(Counting, "most", 0)
    monkeypatch.setattr(Counting, "meeting", threading.Barrier(2) if at_once == 2 else None)
    counting: Any = Counting()
    within = cluster_of(Gang(None, [], [], counting), lambda _: None, shares_nodes=shares_nodes)
    executor = RayExecutor(search_options(device="cpu"), tmp_path, within=within)
    request = Request(Config({"optimizer": optimizer}), tiny.CPU, Budget(GIB, 4 * GIB), Plan())
    side_by_side(lambda number: executor.measure(tiny.mlp_workload(), request, number=number))
    assert Counting.most == at_once


def test_a_probe_that_takes_every_node_along_has_failed(tmp_path: Path) -> None:
    """And the search goes on; another function is an error."""

    def lost(*_: object, **__: object) -> Any:
        raise LostError("a node of the cluster was lost.")

    ended: list[Any] = []
    executor_of_gang: Any = SimpleNamespace(
        measure=lost, run=lost, give_up=lambda: None, end_by=lambda _: None
    )
    gang = Gang(None, [], [], executor_of_gang)
    notes: list[str] = []
    executor = RayExecutor(
        search_options(device="cpu"), tmp_path, notes.append, within=cluster_of(gang, ended.extend)
    )
    found = measure(executor, tiny.mlp_workload(), number=3)
    assert (found.outcome, found.number) == (Outcome.FAILED, 3)
    assert "lost with its node 3 times" in (found.reason or "")
    assert (len(ended), len(notes)) == (3, 2)
    with pytest.raises(ProbeError, match="was lost"):
        executor.run(lambda _: None, None, log="run.log", timeout=1.0)


# Real nodes


DRIVER = """
import sys
from pathlib import Path
from autofit.core.options import search_options
from autofit.probe import RayExecutor
from tests.probe.executors.test_conformance import hanging, measure

folder = Path(sys.argv[1])
with RayExecutor(search_options(device="cpu"), folder) as executor:
    measure(executor, hanging(folder))
"""


@pytest.mark.cluster
def test_a_search_that_is_killed_leaves_nothing_of_a_cluster_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shared = set(Path("/dev/shm").iterdir())
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], cwd=Path(__file__).parents[3]
    )
    hung(tmp_path, 1)
    started = descendants(driver.pid)
    driver.kill()
    driver.wait()
    # Two agents of Ray try to tell somebody for a minute.
    wait_until(
        lambda: not any(map(alive, started)), "all processes have ended", seconds=2 * DEADLINE
    )
    assert set(Path("/dev/shm").iterdir()) <= shared


@pytest.fixture(scope="module")
def real() -> Iterator[Any]:
    """A cluster of two nodes."""
    with cluster(2) as made:
        yield made


def zygotes() -> list[int]:
    """The actors of Ray on this machine."""
    return [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if "ray::Zygote" in " ".join(each.info["cmdline"] or ())
    ]


def test_real_nodes_measure_as_this_machine_does(real: Any, tmp_path: Path) -> None:
    """One after the other, so that one gang of two nodes, and then one node, starts but once."""
    options = search_options(device="cpu", probe_timeout=20.0, nodes=2)
    with RayExecutor(options, tmp_path) as executor:
        assert (executor.devices, executor.places) == (2, 1)
        assert measure(executor, tiny.mlp_workload()).outcome is Outcome.FITS
        for action, outcome in (
            (lambda: os._exit(7), Outcome.FAILED),
            (fail, Outcome.FAILED),
            (lambda: os.kill(os.getpid(), signal.SIGKILL), Outcome.HOST_OUT_OF_MEMORY),
            (lambda: bytearray(4 << 30), Outcome.OUT_OF_MEMORY),
        ):
            assert measure(executor, doing(action)).outcome is outcome
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(measure, executor, hanging(tmp_path))
            children = hung(tmp_path, 2)
            executor.give_up()
            assert isinstance(waiting.exception(timeout=60), ProbeError)
    wait_until_gone(children)
    assert {"0000.log", "0000-rank-1.log"} <= {path.name for path in tmp_path.iterdir()}
    wait_until(lambda: not zygotes(), "all actors have ended")


@pytest.mark.cluster
def test_a_search_that_is_killed_leaves_nothing_on_the_nodes(real: Any, tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], cwd=Path(__file__).parents[3]
    )
    children = hung(tmp_path, 1)
    assert zygotes()
    driver.kill()
    driver.wait()
    wait_until_gone(children)
    wait_until(lambda: not zygotes(), "all actors have ended")
    # which finds all of the room
    with RayExecutor(search_options(device="cpu"), tmp_path) as executor:
        assert executor.run(lambda _: 7, None, log="seven.log", timeout=60.0) == 7


@pytest.mark.cluster
def test_a_search_goes_on_while_a_node_is_lost_and_another_joins(real: Any, tmp_path: Path) -> None:
    """Nothing is lost, nothing measured twice, the answer is verified and that of a search without Ray, and nothing is
    left behind."""
    real.add_node(num_cpus=1, **SMALL)
    shared, events = set(Path("/dev/shm").iterdir()), list[Event]()

    def listener(event: Event) -> None:
        events.append(event)
        if isinstance(event, ProbeStarted) and event.number == 2 and not event.verifying:
            real.remove_node(min(real.worker_nodes, key=str), allow_graceful=False)
            real.add_node(num_cpus=1, **SMALL)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        # which nothing can be predicted of: the search goes on to its last trial
        float(next(model.parameters()).sum())
        time.sleep(0.05 / len(batch[0]))  # so that which size is best is no matter of noise
        return tiny.classify(model, batch)

    plain = tiny.mlp_workload()
    workload = Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)
    knobs = "  micro_batch_size: [1, 2, 4]\n  optimizer: [adamw, sgd]\n  optimizer_in_backward: [false]\n"
    (tmp_path / "space.yaml").write_text(f"description: for a test\nknobs:\n{knobs}")
    given: dict[str, Any] = {
        "space": str(tmp_path / "space.yaml"),
        "store": False,
        "device": "cpu",
        "mem": 1,
    }
    given |= {"tolerance": 0.0}
    result = autofit.search(
        workload, executor="ray", out=tmp_path / "run", listener=listener, **given
    )
    local = autofit.search(workload, out=tmp_path / "local", **given)
    assert result.best
    assert local.best
    assert result.best.verified
    assert [each.outcome for each in result.trials] == [Outcome.FITS] * len(result.trials)
    assert len({each.config for each in result.trials}) == len(result.trials) > 3
    assert {each.config for each in result.trials} == {each.config for each in local.trials}
    assert result.best.config["micro_batch_size"] == local.best.config["micro_batch_size"] == 4
    told = [
        event.measurement.number
        for event in events
        if isinstance(event, ProbeFinished) and not event.measurement.verified
    ]
    assert sorted(told) == list(range(len(result.trials)))
    assert (tmp_path / "run" / "probes" / "0000.log").exists()
    wait_until(lambda: not zygotes(), "all actors have ended")
    assert set(Path("/dev/shm").iterdir()) <= shared
