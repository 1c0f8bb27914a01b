"""Places: what a worker's zygote finds of the machine, seen in processes that are started there."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.core.hardware import GIB
from autofit.probe import Place, physical_cores, place_probes, place_ranks
from autofit.probe import placement as place_module
from tests import tiny

HERE = sorted(os.sched_getaffinity(0))
CARD = dataclasses.replace(
    tiny.CPU, device="cuda", name="NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0)
)


def machine(folder: Path, siblings: Mapping[int, str], sockets: Mapping[int, int]) -> Path:
    """A folder that tells of processors as the system does."""
    for processor, text in siblings.items():
        topology = folder / f"cpu{processor}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
        (topology / "physical_package_id").write_text(f"{sockets[processor]}\n")
    return folder


def allowed(monkeypatch: pytest.MonkeyPatch, processors: set[int]) -> None:
    monkeypatch.setattr(place_module.os, "sched_getaffinity", lambda process: processors)


def test_cores_are_physical_ones_and_those_of_a_socket_stand_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}
    folder = machine(tmp_path, siblings, {0: 0, 4: 0, 1: 1, 5: 1, 2: 0, 3: 0})
    allowed(monkeypatch, {0, 1, 2, 3, 4, 5})
    assert physical_cores(folder) == [{0, 4}, {2, 3}, {1, 5}]
    allowed(monkeypatch, {1, 2, 4})  # by taskset, or a container's cpuset
    assert physical_cores(folder) == [{2}, {4}, {1}]


def test_where_the_system_tells_nothing_every_processor_is_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed(monkeypatch, {3, 1})
    assert physical_cores(tmp_path) == [{1}, {3}]


@pytest.mark.parametrize(("count", "share"), [(2, 3), (3, 2), (4, 1), (7, 1)])
def test_workers_get_as_many_cores_each_and_none_shares_one(
    monkeypatch: pytest.MonkeyPatch, count: int, share: int
) -> None:
    cores = [frozenset({each, each + 7}) for each in range(7)]
    monkeypatch.setattr(place_module, "physical_cores", lambda: cores)
    places = place_probes(count, tiny.CPU, list).places
    assert [place.number for place in places] == list(range(count))
    assert {place.cores for place in places} == {share}
    assert all(len(place.processors) == 2 * share for place in places)
    assert len(frozenset().union(*(place.processors for place in places))) == 2 * share * count


def test_more_workers_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "physical_cores", lambda: [frozenset({0}), frozenset({1})])
    with pytest.raises(
        InputError, match="3 workers need a core each, and this process may use 2 cores"
    ) as caught:
        place_probes(3, tiny.CPU, list)
    assert caught.value.exit_code == 2
    monkeypatch.setattr(place_module, "physical_cores", lambda: [frozenset({0})])
    with pytest.raises(InputError, match="may use 1 core"):
        place_probes(2, tiny.CPU, list)


def test_a_card_is_the_only_one_that_is_visible() -> None:
    first, second = place_probes(None, CARD, lambda: ["GPU-5a1", "GPU-7b2"]).places
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-5a1,GPU-7b2", "OMP_NUM_THREADS": "8"}
    second.set_environment(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-7b2", "OMP_NUM_THREADS": "8"}
    assert (first.number, second.number) == (0, 1)


@pytest.mark.parametrize(
    ("asked", "threads"),
    [({}, "4"), ({"OMP_NUM_THREADS": "2"}, "2"), ({"OMP_NUM_THREADS": "16"}, "4")],
)
def test_a_worker_has_a_thread_for_each_of_its_cores_unless_the_user_wants_fewer(
    asked: dict[str, str], threads: str
) -> None:
    environment = dict(asked)
    Place(0, processors=frozenset(range(8)), cores=4).set_environment(environment)
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment["MKL_NUM_THREADS"] == "4"


def test_the_whole_machine_is_left_as_it_is() -> None:
    environment: dict[str, str] = {}
    Place(0).set_environment(environment)
    with Place(0).entered():
        assert sorted(os.sched_getaffinity(0)) == HERE
    assert environment == {}


def test_what_is_started_there_is_bound_from_the_start_and_nobody_else_is() -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    place = Place(0, processors=frozenset({HERE[-1]}), cores=1)
    with (
        place.entered(),
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as started,
    ):
        out, _ = started.communicate(timeout=60)
    assert out.strip() == str([HERE[-1]])
    assert sorted(os.sched_getaffinity(0)) == HERE


def test_on_a_cpu_probes_run_one_at_a_time_unless_workers_are_requested() -> None:
    assert place_probes(None, tiny.CPU, list).places == place_probes(1, tiny.CPU, list).places == ()


def test_on_cards_there_is_one_place_on_each_idle_card_by_default() -> None:
    def cards() -> list[str]:
        return ["a", "b", "c"]

    assert [place.card for place in place_probes(None, CARD, cards).places] == ["a", "b", "c"]
    assert [place.card for place in place_probes(2, CARD, cards).places] == ["a", "b"]
    assert place_probes(1, CARD, cards).places == ()
    with pytest.raises(
        InputError, match="4 workers need a card each like card 0, and 3 of the visible cards are"
    ):
        place_probes(4, CARD, cards)


def test_gangs_share_the_cards_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place_probes(None, CARD, lambda: list("abcde"), 2)
    assert ([place.card for place in found.places], found.devices) == (["a", "b", "c", "d"], 2)
    assert found.describe(CARD) == (
        "2 probes run at a time, each on 2 cards of its own (NVIDIA H200); whatever may be the best is measured again"
        " alone."
    )
    assert place_probes(None, CARD, lambda: ["a", "b", "c"], 2).places == ()  # one gang
    assert (
        place_probes(1, CARD, lambda: list("abcd"), 2).places
        == place_probes(None, tiny.CPU, list, 2).places
        == ()
    )
    with pytest.raises(
        InputError,
        match="3 workers of 2 devices need a card each like card 0, and 5 of the visible",
    ):
        place_probes(3, CARD, lambda: list("abcde"), 2)
    monkeypatch.setattr(
        place_module, "physical_cores", lambda: [frozenset({each}) for each in range(8)]
    )
    assert "2 probes run at a time, each on 4 of 8 cores" in str(
        place_probes(2, tiny.CPU, list, 2).describe(tiny.CPU)
    )


def test_on_the_only_card_of_its_kind_probes_run_one_at_a_time() -> None:
    assert place_probes(None, CARD, lambda: ["a"]).places == ()
    with pytest.raises(InputError, match="1 of the visible cards is an idle NVIDIA H200"):
        place_probes(2, CARD, lambda: ["a"])


def test_each_device_of_a_training_has_a_card_or_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cards() -> list[str]:
        return ["a", "b", "c"]

    assert place_ranks(1, CARD, cards) == place_ranks("all", CARD, lambda: ["a"]) == ()
    assert [place.card for place in place_ranks(2, CARD, cards)] == ["a", "b"]
    assert [place.card for place in place_ranks("all", CARD, cards)] == ["a", "b", "c"]
    assert place_ranks(4, CARD, cards) == ()  # one stands for all
    monkeypatch.setattr(
        place_module, "physical_cores", lambda: [frozenset({each}) for each in range(4)]
    )
    assert [place.processors for place in place_ranks(2, tiny.CPU, list)] == [
        frozenset({0, 1}),
        frozenset({2, 3}),
    ]
    assert place_ranks(5, tiny.CPU, list) == ()
    with pytest.raises(InputError, match="--devices all means cards, and the device is the CPU"):
        place_ranks("all", tiny.CPU, list)
