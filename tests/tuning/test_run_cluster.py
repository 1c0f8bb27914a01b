"""A search whose probes run on a cluster, by a formula: who measures, what is told, and what it can be resumed with."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.core.events import Event, Note
from autofit.core.options import SearchOptions
from autofit.probe import Place
from autofit.tuning import measured as tune
from autofit.tuning.annotations import Annotator
from tests.tuning.searching import Bench, FakeExecutor


class FakeCluster(FakeExecutor):
    """Two nodes, each with one place."""

    def __init__(self, bench: Bench, options: SearchOptions) -> None:
        super().__init__(bench.executor.answer, bench.executor.hardware, bench.executor.traits)
        self.devices = int(options.devices) * options.nodes
        self.own_ranks = (
            tuple(Place(rank, cores=1) for rank in range(self.devices)) if self.devices > 1 else ()
        )
        self.entered = 0

    def describe(self) -> str:
        return "two nodes are used."

    def free_slots(self) -> int:
        self.entered += 1
        return 2


@pytest.fixture
def clusters(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[FakeCluster]:
    made: list[FakeCluster] = []

    def connect(
        options: SearchOptions, logs: Path, notify: Callable[[str], None], until: float
    ) -> FakeCluster:
        made.append(FakeCluster(bench, options))
        return made[-1]

    monkeypatch.setattr(tune, "RayExecutor", connect)
    monkeypatch.setattr(Annotator, "on_devices", lambda *_: ())
    return made


def test_all_is_measured_there_and_nothing_here(bench: Bench, clusters: list[FakeCluster]) -> None:
    events: list[Event] = []
    result = bench.search(executor="ray", listener=events.append)
    assert result.best
    assert result.best.verified
    assert clusters[0].entered
    assert len(clusters[0].asked) > len(result.trials)  # finals, too
    assert not bench.executor.asked
    assert Note("two nodes are used.") in events


def test_ranks_are_those_of_the_cluster(bench: Bench, clusters: list[FakeCluster]) -> None:
    bench.space(micro_batch_size=[1, 2], data_parallel="all")
    result = bench.search(executor="ray", devices=2, nodes=2)
    assert (result.hardware.devices, result.hardware.nodes) == (2, 2)
    assert result.best
    assert result.best.verified
    assert not bench.executor.asked


def test_what_was_measured_on_other_processors_is_not_gone_on_with(
    bench: Bench, clusters: list[FakeCluster]
) -> None:
    bench.search(executor="ray", trials=2)
    assert len(bench.search(executor="ray", trials=3, resume=True).trials) == 3
    with pytest.raises(InputError, match="processors_of_each_probe was 2, is None"):
        bench.search(trials=4, resume=True)
    bench.executor.hardware = dataclasses.replace(bench.executor.hardware, cores=8)
    with pytest.raises(InputError, match="processors_of_each_probe was 2, is 8"):
        bench.search(executor="ray", trials=4, resume=True)
