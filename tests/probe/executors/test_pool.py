"""The pool: what needs the host is measured one at a time, and gangs have places of their own.

That each worker measures in its own place is tested with all executors.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.probe import Place, Plan, PoolExecutor, Request
from autofit.probe.executors import pool as workers_module
from tests import tiny
from tests.probe.executors.test_conformance import PLACES

BUDGET, QUICK = Budget(GIB, 4 * GIB), Plan(min_steps=2, max_steps=2)


def side_by_side(action: Callable[[int], Any]) -> list[Any]:
    """What the action returned of 0 and 1, called at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(action, range(2)))


class Counting:
    """Stands in for a LocalExecutor: counts how many measure at once; two of them wait for each other if `meeting`."""

    alive = most = 0
    lock = threading.Lock()
    meeting: threading.Barrier | None = None

    def end_by(self, until: float) -> None:
        assert until > 0

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, workload: Workload, request: Request, **_: object) -> Measurement:
        with Counting.lock:
            Counting.alive += 1
            Counting.most = max(Counting.most, Counting.alive)
        if Counting.meeting:
            Counting.meeting.wait(60)
        time.sleep(0.05)
        with Counting.lock:
            Counting.alive -= 1
        return Measurement(request.config, Outcome.FITS)


@pytest.mark.parametrize(
    ("knobs", "at_once"),
    [
        ({}, 2),
        ({"optimizer": "adamw-8bit"}, 2),
        ({"optimizer": "paged-adamw-8bit"}, 1),
        ({"activation_offload": "cpu"}, 1),
        ({"optimizer_offload": "cpu"}, 1),
        ({"parameter_offload": "cpu"}, 1),
    ],
)
def test_what_keeps_something_on_the_host_is_measured_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knobs: dict[str, str], at_once: int
) -> None:
    monkeypatch.setattr(workers_module, "LocalExecutor", Counting)
    monkeypatch.setattr(Counting, "most", 0)
    monkeypatch.setattr(Counting, "meeting", threading.Barrier(2) if at_once == 2 else None)
    fake = PoolExecutor(PLACES, tmp_path, 1.0)
    config = Config(knobs)

    def ask(number: int) -> None:
        fake.measure(tiny.mlp_workload(), Request(config, tiny.CPU, BUDGET, QUICK), number=number)

    side_by_side(ask)
    assert Counting.most == at_once


def test_a_gang_takes_places_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[int]] = []

    class Gang(Counting):
        def __init__(self, places: Sequence[Place], *_: object) -> None:
            started.append([place.number for place in places])

    monkeypatch.setattr(workers_module, "GangExecutor", Gang)
    monkeypatch.setattr(Counting, "most", 0)
    monkeypatch.setattr(Counting, "meeting", threading.Barrier(2))
    gangs = PoolExecutor([Place(number) for number in range(6)], tmp_path, 1.0, 3)
    assert started == [[0, 1, 2], [3, 4, 5]]
    request = Request(Config({}), tiny.CPU.of_several(3), BUDGET, QUICK)
    side_by_side(lambda number: gangs.measure(tiny.mlp_workload(), request, number=number))
    assert Counting.most == gangs.places == 2


def test_a_worker_that_cannot_be_started_ends_those_that_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[int] = []

    class Failing:
        def __init__(self, logs: Path, timeout: float, place: Place) -> None:
            self.place = place
            if place.number == 1:
                raise OSError("no more processes")

        def __enter__(self) -> "Failing":
            return self

        def __exit__(self, *_: object) -> None:
            ended.append(self.place.number)

    monkeypatch.setattr(workers_module, "LocalExecutor", Failing)
    with contextlib.suppress(OSError):
        PoolExecutor(PLACES, tmp_path, 1.0)
    assert ended == [0]
