"""A search for several devices: every config is measured on all of them, and the answer says how many they are."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event, Note, ProbeFinished
from autofit.core.hardware import MIB, Hardware
from autofit.core.links import Link
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import search_options
from autofit.core.result import Result, SavedResult
from autofit.estimate.calibration import calibration_for
from autofit.estimate.overlap import Unit
from autofit.estimate.ranks import Exchanges, exchanges_of
from autofit.hardware.catalogue import link, links_of
from autofit.probe import GangExecutor, Place
from autofit.report.explain import explain
from autofit.search.surrogate import Surrogate
from autofit.tuning import measured as tune
from autofit.tuning import pipeline
from autofit.tuning.annotations import Annotator
from tests import tiny
from tests.probe.bare import bare
from tests.probe.executors.test_conformance import PLACES
from tests.tuning.searching import TRAITS, Bench, fits


@pytest.fixture
def gang(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Place, ...]]]:
    """The places of the gangs that a search started; probes are a formula."""
    started: list[tuple[Place, ...]] = []

    def start(places: tuple[Place, ...], *_: object) -> Any:
        started.append(places)
        return bench.executor

    monkeypatch.setattr(tune, "GangExecutor", start)
    monkeypatch.setattr(Annotator, "on_devices", lambda *_: ())
    monkeypatch.setattr(
        "autofit.probe.placement.physical_cores", lambda: [frozenset({each}) for each in range(4)]
    )
    bench.space(micro_batch_size=[1, 2, 4], data_parallel="all", tensor_parallel="all")
    yield started


def test_all_is_measured_on_several_devices_and_the_files_say_so(
    bench: Bench, gang: list[Any]
) -> None:
    events: list[Event] = []
    result = bench.search(devices=2, listener=events.append)
    assert [len(places) for places in gang] == [2]
    assert (result.hardware.devices, result.hardware.nodes, result.hardware.title) == (
        2,
        1,
        "2 x a CPU",
    )
    assert {config["data_parallel"] for config, _ in bench.executor.asked} == {"fsdp", "ddp"}
    assert bench.executor.verified
    saved = SavedResult.load(bench.folder / "run" / "result.yaml")
    assert (saved.hardware["devices"], saved.hardware["nodes"]) == (2, 1)
    assert "\ndevices: 2\nnodes: 1\n" in (bench.folder / "run" / "result.yaml").read_text()
    assert "<dd>2 x a CPU, " in (bench.folder / "run" / "report.html").read_text()
    assert Note("2 processes train each config together, on 2 cores each.") in events
    assert saved.config["data_parallel_shard"] in (1, 2)


def test_one_device_takes_no_gang_and_knows_no_knobs_of_several(
    bench: Bench, gang: list[Any]
) -> None:
    bench.space(
        micro_batch_size=[1, 2],
        data_parallel="all",
        tensor_parallel="all",
        data_parallel_replicate="all",
    )
    result = bench.search()
    assert not gang
    assert result.space_size == 2
    assert result.config
    assert result.config["data_parallel"] is None


def test_several_gangs_explore_at_once_and_finalists_are_alone(
    bench: Bench, gang: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[int, int]] = []

    def pool(places: tuple[Place, ...], *given: Any) -> Any:
        pools.append((len(places), given[-1]))
        return bench.executor

    monkeypatch.setattr(tune, "PoolExecutor", pool)
    result = bench.search(devices=2, workers=2, mem=0.5)
    assert pools == [(4, 2)]
    assert [len(places) for places in gang] == [2]
    assert bench.executor.verified
    assert (
        "Explored 2 probes at a time, each on 2 of 4 cores; verified measurements are on all cores."
        in result.notes
    )


def test_it_is_resumed_on_as_many_devices(bench: Bench, gang: list[Any]) -> None:
    bench.search(devices=2, trials=2)
    with pytest.raises(InputError, match="devices was 2, is 4"):
        bench.search(devices=4, trials=4, resume=True)
    with pytest.raises(InputError, match="devices was 2, is None"):
        bench.search(trials=4, resume=True)
    assert len(bench.search(devices=2, trials=4, resume=True).trials) == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": 3}, "an effective batch of 8 cannot be divided among 3 devices"),
        ({"devices": 4, "mem": 2.5}, "4 devices with a budget of 2.50 GiB each may take more than"),
    ],
)
def test_what_cannot_be_searched(
    bench: Bench, gang: list[Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        bench.search(**given)


@pytest.mark.parametrize(("devices", "nodes"), [(8, 1), (2, 2)])
def test_one_rank_stands_for_all_where_there_are_fewer_devices(
    bench: Bench, gang: list[Any], monkeypatch: pytest.MonkeyPatch, devices: int, nodes: int
) -> None:
    def run(function: Any, _: object, *__: object, **___: Any) -> Any:
        if function is not exchanges_of:
            raise ProbeError("nothing else is predicted.")
        units = [([Unit(1.0, gather=0.25)], 1)], [([Unit(2.0, reduce=0.75)], 1)]
        return Exchanges(units, units, 0)

    def answer(config: Config, _: bool) -> Measurement:
        # a step of 2 s, as much as the prediction's
        return fits(config, 4.0, communication_seconds=0.0)

    monkeypatch.setattr(bench.executor, "run", run)
    monkeypatch.setattr(Annotator, "timelines", lambda *_: {})
    result = bench.search(answer, devices=devices, nodes=nodes)
    assert not gang
    assert {config["data_parallel_replicate"] for config, _ in bench.executor.asked} >= {
        1,
        devices * nodes,
    }
    best = result.best
    assert best
    assert best.step_seconds
    assert best.communication_seconds
    # The first gathering and the last reduction are waited for, and what is sent slows the computation down.
    assert best.communication_seconds == pytest.approx(1.0, rel=0.2)
    assert best.step_seconds.median == pytest.approx(2.0 + best.communication_seconds)
    assert best.samples_per_second == pytest.approx(8 / best.step_seconds.median)
    assert f"Rank 0 of {devices * nodes} stands for all" in result.notes[-1]
    with pytest.raises(
        InputError, match=r"predicted_links was 'gloo between processes.*, is '.*PCIe 4.0"
    ):
        bench.search(answer, devices=devices, nodes=nodes, link="pcie4", resume=True)
    saved = SavedResult.load(bench.folder / "run" / "result.yaml")
    assert saved.measured["verified"] is False
    assert saved.measured["predicted_communication_seconds"] == pytest.approx(
        best.communication_seconds, rel=1e-3
    )
    assert "communication predicted" in (bench.folder / "run" / "report.html").read_text()


def test_each_device_has_a_share_of_the_memory_by_default(bench: Bench, gang: list[Any]) -> None:
    whole = bench.search(
        mem=None, device="cpu", out=bench.folder / "one", trials=1
    ).budget.device_bytes
    assert (
        bench.search(mem=None, device="cpu", devices=2, trials=1).budget.device_bytes == whole // 2
    )


def test_what_is_known_from_earlier_is_of_as_many_devices(bench: Bench, gang: list[Any]) -> None:
    bench.executor.traits = dataclasses.replace(TRAITS, fingerprint="of this model")
    told: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith("earlier searches measured"):
            told.append(event.text.split(":")[0])

    for name, devices in (("first", 2), ("more", 4), ("again", 2)):
        bench.search(
            devices=devices, trials=3, out=bench.folder / name, store=True, listener=listener
        )
    assert told == ["earlier searches measured 3 configs"]


def test_predictions_are_used_where_there_are_some(
    bench: Bench, gang: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def run(function: Any, _: object, hardware: Hardware, configs: Any, **__: Any) -> Any:
        asked.append(hardware.world)
        seconds = [8.0 / int(str(config["micro_batch_size"])) for config in configs]
        return [float(MIB)] * len(configs), seconds

    monkeypatch.setattr(bench.executor, "run", run)
    monkeypatch.setattr(Annotator, "timelines", lambda *_: {})
    result = bench.search(devices=2, trials=1)
    assert asked == [2]
    assert result.predicted
    assert bench.executor.explored == [4]  # the largest, which is predicted to be the fastest
    assert result.best
    assert calibration_for(result.hardware, result.best.config).count == 1
    assert not calibration_for(tiny.CPU).count, (
        "what is known of one device is not changed by several"
    )


def test_the_link_between_the_devices_is_measured_unless_it_is_named(
    bench: Bench, gang: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, used, notes = Link("measured here", 2e9, 1e-4), list[Any](), list[Event]()

    def run(_: object, __: object, hardware: Hardware, configs: Any, **___: Any) -> Any:
        used.append(links_of(hardware).within)
        return [float(MIB)] * len(configs), [1.0] * len(configs)

    monkeypatch.setattr(bench.executor, "run", run)
    monkeypatch.setattr(bench.executor, "link", lambda *_: measured)
    monkeypatch.setattr(Annotator, "timelines", lambda *_: {})
    bench.search(devices=2, trials=1, out=bench.folder / "one", listener=notes.append)
    bench.search(devices=2, trials=1, out=bench.folder / "two", link="pcie4")
    assert used == [measured, link("pcie4")]
    exchange = "They exchange 2 GB/s after 100 microseconds, as measured."
    assert any(isinstance(each, Note) and each.text.endswith(exchange) for each in notes)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are enough where their times mean nothing: on a busy machine they vary until the time is up."""
    for name in ("EXPLORE_PLAN", "VERIFY_PLAN"):
        monkeypatch.setattr(
            tune, name, dataclasses.replace(getattr(tune, name), min_steps=2, max_steps=2)
        )


def searched(folder: Path, listener: Callable[[Event], None], **given: Any) -> Result:
    options = {
        "space": str(folder / "space.yaml"),
        "mem": 0.5,
        "out": folder / "run",
        "devices": 2,
        "store": False,
    }
    return pipeline.run_search(tiny.mlp_workload(8), search_options(**(options | given)), listener)


def test_a_rank_that_stands_for_all_is_really_measured(
    tmp_path: Path, shared_zygote: None, quick: None
) -> None:
    knobs = "  micro_batch_size: [1]\n  data_parallel: [fsdp]\n  optimizer: [adamw]\n  attention: [sdpa]\n"
    (tmp_path / "space.yaml").write_text(f"description: for a test\nknobs:\n{knobs}")
    result = searched(tmp_path, lambda _: None, devices=4, nodes=2, trials=1)
    best = result.best
    assert best
    assert best.step_seconds
    assert best.communication_seconds
    assert 0.0 < best.communication_seconds < best.step_seconds.median
    assert best.loss is None
    assert "rank 0 measured in longer runs, communication predicted" in explain(result)


def test_a_search_that_is_interrupted_and_resumed_measures_nothing_twice(
    tmp_path: Path, shared_zygote: None, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.tuning.context.place_ranks", lambda *_: tuple(PLACES))
    # a slow one would rule out small micro-batches
    monkeypatch.setattr(GangExecutor, "link", lambda *_: None)
    knobs = (
        "  micro_batch_size: [1]\n  data_parallel: all\n  optimizer: [adamw]\n  attention: [sdpa]\n"
    )
    (tmp_path / "space.yaml").write_text(f"description: for a test\nknobs:\n{knobs}")
    measured: list[Any] = []

    def listener(event: Event) -> None:
        if isinstance(event, ProbeFinished) and not event.measurement.verified:
            measured.append(event.measurement)
            if len(measured) == 1:
                raise KeyboardInterrupt

    # else noise decides whether to go on
    monkeypatch.setattr(Surrogate, "can_improve", lambda *_: True)
    # one for both searches, of which the second would start another
    with bare(lambda: GangExecutor(PLACES, tmp_path / "probes", 120.0)) as gang:
        monkeypatch.setattr(tune, "GangExecutor", lambda *_: contextlib.nullcontext(gang))
        assert searched(tmp_path, listener).stopped_by == "interrupt"
        result = searched(tmp_path, listener, resume=True)

    assert {each.outcome for each in result.trials} == {Outcome.FITS}
    assert len(measured) == len(result.trials) == len({each.config for each in measured}) == 2
    assert {each.config["data_parallel"] for each in measured} == {"ddp", "fsdp"}
    assert result.best
    assert result.best.verified
