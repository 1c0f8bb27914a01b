"""A cluster: which nodes are used and which are told of, what a gang takes, and what happens when nodes go and come."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autofit.core.errors import InputError, NoDeviceError, ProbeError
from autofit.core.options import search_options
from autofit.probe.executors import cluster as module
from autofit.probe.executors.cluster import Cluster
from autofit.probe.executors.far import Zygote
from tests.probe.executors.fake_ray import FakeRay
from tests.processes import wait_until

GIVEN_UP = threading.Event()
GIVEN_UP.set()


def card(kind: str, count: int) -> dict[str, float]:
    """What a node with so many cards has."""
    return {"CPU": 64.0, "GPU": float(count), f"accelerator_type:{kind}": 1.0}


def cluster(
    ray: FakeRay, *, until: float = float("inf"), notes: list[str] | None = None, **options: Any
) -> Cluster:
    with ray.installed():
        told = [] if notes is None else notes
        return Cluster(search_options(executor="ray", **options), Path(), told.append, until)


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="need Ray, which is not installed") as caught:
        Cluster(search_options(executor="ray"), Path(), lambda _: None, 0.0)
    assert "pip install 'torch-autofit[cluster]'" in caught.value.remedy


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        ("ray://head:10001", InputError, "RAY_ADDRESS is ray://head:10001, a client's address"),
        ("http://head:8265", InputError, "a client's address"),
        ("127.0.0.1:1", ProbeError, "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1"),
    ],
)
def test_an_address_that_leads_nowhere_is_told(
    monkeypatch: pytest.MonkeyPatch, address: str, kind: type[Exception], words: str
) -> None:
    ray = FakeRay(a={"CPU": 2.0})
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(kind, match=words):
        cluster(ray)


def test_a_search_names_its_card_and_others_are_left_idle_and_told() -> None:
    nodes = {"a": card("A100", 8), "b": card("T4", 4), "c": card("A100", 8), "head": {"CPU": 0.0}}
    notes: list[str] = []
    used = cluster(FakeRay(**nodes), gpu_mem=40, devices=4, notes=notes)
    assert used.describe() == "4 probes run at a time on a Ray cluster of 2 nodes with A100."
    assert notes == [
        "the node 127.0.0.1 is left idle: speeds on T4 cannot be compared with those on A100."
    ]
    assert (
        cluster(FakeRay(**nodes), gpu="t4").describe()
        == "4 probes run at a time on a Ray cluster of 1 node with T4."
    )
    assert cluster(FakeRay(**nodes), devices="all").world == 8


def test_unlike_processors_are_told_too() -> None:
    notes: list[str] = []
    used = cluster(FakeRay(a={"CPU": 8.0}, b={"CPU": 16.0}), device="cpu", notes=notes)
    assert used.describe().startswith(
        "one probe runs at a time on a Ray cluster of 1 node with 16 processors of "
    )
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("nodes", "options", "room"),
    [
        ({"a": card("H100", 8), "b": card("H100", 8)}, {"devices": 8, "nodes": 2}, 1),
        (
            {"a": card("H100", 8), "b": card("H100", 8), "c": card("H100", 8)},
            {"devices": 4, "nodes": 2},
            3,
        ),
        ({"a": card("H100", 8), "b": card("H100", 8)}, {"devices": 3}, 4),
        ({"a": card("H100", 8), "b": card("H100", 8)}, {"workers": 5}, 5),
        ({"a": {"CPU": 8.0}, "b": {"CPU": 8.0}, "c": {"CPU": 8.0}}, {"device": "cpu"}, 3),
        ({"a": {"CPU": 8.0}, "b": {"CPU": 8.0}}, {"device": "cpu", "workers": 4}, 4),
    ],
)
def test_as_many_gangs_as_there_is_room_for(nodes: Any, options: dict[str, Any], room: int) -> None:
    assert cluster(FakeRay(**nodes), **options).free_slots() == room


def test_processors_of_a_node_are_divided_by_all_that_train_there() -> None:
    used = cluster(FakeRay(a={"CPU": 16.0}, b={"CPU": 16.0}), device="cpu", workers=4, devices=2)
    assert (used.processors, used.sharing) == (4, 4)


@pytest.mark.parametrize(
    ("nodes", "options", "kind", "words"),
    [
        (
            {"a": {"CPU": 8.0}},
            {"gpu_mem": 24},
            NoDeviceError,
            "no node of the Ray cluster has a GPU",
        ),
        ({"a": {"CPU": 0.0}}, {"device": "cpu"}, ProbeError, "has a processor for tasks"),
        (
            {"a": card("L4", 2)},
            {"devices": 4},
            InputError,
            "4 cards of a node are needed, and the cluster's have 2 each",
        ),
        (
            {"a": {"CPU": 2.0}},
            {"device": "cpu", "workers": 3},
            InputError,
            "3 processors of a node are needed",
        ),
        (
            {"a": {"CPU": 2.0}},
            {"device": "cpu", "devices": "all"},
            InputError,
            "--devices all means cards",
        ),
    ],
)
def test_what_a_cluster_lacks(
    nodes: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        cluster(FakeRay(**nodes), **options)


def test_other_versions_are_told_before_anything_runs() -> None:
    ray = FakeRay(a={"CPU": 2.0}, b={"CPU": 2.0})
    ray.versions["b"] = {"torch": "1.0.0+cu128", "autofit": None}
    with pytest.raises(
        ProbeError,
        match=r"the node 127.0.0.1 .* has torch 1.0.0\+cu128 instead of .* and no autofit\.",
    ):
        cluster(ray, device="cpu")
    assert not ray.groups


def test_nodes_that_join_are_used_unless_they_are_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.0)
    notes: list[str] = []
    ray = FakeRay(a={"CPU": 2.0})
    used = cluster(ray, device="cpu", notes=notes)
    assert used.free_slots() == 1
    ray.versions["old"] = {"torch": "1.0.0"}
    ray.join(b={"CPU": 2.0}, old={"CPU": 2.0}, larger={"CPU": 4.0})
    assert used.free_slots() == 2
    assert len(notes) == 2
    ray.lose("a")
    assert used.free_slots() == 1


def test_a_full_cluster_is_waited_for_visibly_and_not_beyond_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PATIENT", 0.0)
    monkeypatch.setattr(module, "_POLL", 0.01)
    ray, notes = FakeRay(a={"CPU": 2.0}), list[str]()
    others = ray.util.placement_group([{"CPU": 1}], strategy="STRICT_PACK")
    assert others.wait(1)
    used = cluster(ray, device="cpu", notes=notes, until=time.monotonic() + 0.2)
    with pytest.raises(
        ProbeError,
        match=r"had no room for a probe \(2 processors of 1 node\) within the time limit",
    ):
        used.take(threading.Event())
    assert notes == ["the Ray cluster is full: a probe waits for 2 processors of 1 node."]
    with pytest.raises(ProbeError, match="given up"):
        used.take(GIVEN_UP)
    assert ray.groups == [others]


def test_a_node_that_is_lost_while_a_gang_starts_there_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray itself has what starts there wait for room on other nodes."""
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.0)
    ray = FakeRay(a={"CPU": 2.0}, b={"CPU": 2.0})

    def begin(zygote: Zygote, number: int, part: int, parts: int) -> None:
        if len(ray.actors) == 1:
            del ray.alive["a"]
            wait_until(lambda: ray.actors[0].dead, "it is ended")

    monkeypatch.setattr(Zygote, "begin", begin)
    used = cluster(ray, device="cpu")
    gang = used.take(threading.Event())
    assert gang.parts == [("b", 0)]
    used.give_back(gang)
    used.close()
    assert not ray.groups
