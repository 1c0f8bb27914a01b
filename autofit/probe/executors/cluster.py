"""A Ray cluster as a search sees it: which of its nodes are alike, how many gangs they have room for, and the gangs.

The one file that imports Ray, and only where a cluster is asked for.
"""

import contextlib
import importlib.metadata
import logging
import math
import os
import platform
import re
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.environment import versions
from autofit.core.errors import InputError, NoDeviceError, ProbeError, pluralize
from autofit.core.options import ALL, SearchOptions
from autofit.probe.executors.far import FarGang, FarWorker, LostError, Zygote

_COMPARED = ("python", "torch", "autofit")
_STORE_BYTES = 100 * 2**20  # of shared memory in a cluster of our own: what crosses it is small
_POLL, _LOOK_AGAIN, _TELL_AGAIN = 0.2, 2.0, 60.0  # seconds
_SURVEY_SECONDS, _END_SECONDS = 120.0, 15.0
_PATIENT = 3.0  # seconds of waiting for room that nobody need be told of
_FAILURES = 3  # gangs that did not start, one after another, until that is not their nodes' fault

_HOST_AND_PORT, _ANSWER_SECONDS = re.compile(r"(.+):(\d+)"), 10.0

Found = tuple[dict[str, str | None], str]  # versions of what is compared, and the processor


@dataclass(frozen=True)
class _Node:
    """A node that has what a search wants. `kind`: its card, or its processors; `amount`: of them."""

    id: str
    address: str
    kind: str
    amount: int


@dataclass(eq=False)
class Gang:
    """One place of a cluster. `executor` measures there; `parts`: of which nodes, and which part where these are
    divided."""

    group: Any
    parts: list[tuple[str, int]]
    workers: list[FarWorker]
    executor: FarWorker | FarGang


class Cluster:
    """A connection to a Ray cluster, and what this process has there. Several threads may call its methods."""

    def __init__(
        self, options: SearchOptions, logs: Path, notify: Callable[[str], None], until: float
    ) -> None:
        """`until`: the time, of time.monotonic, to wait for room. Raises InputError where Ray is not installed or the
        wrong one is named, ProbeError where the cluster cannot be used."""
        self._ray = _imported()
        self._options, self._logs, self._notify, self._until = options, logs, notify, until
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._idle: list[Gang] = []
        self._parts: defaultdict[str, set[int]] = defaultdict(set)  # of each node that are in use
        self._alike: dict[str, _Node] = {}
        self._left_out: set[str] = set()  # nodes of another kind, or with other versions
        self._alive: set[str] = set()
        self._looked = self._told = -math.inf
        self._failures = 0
        self._kind = ""
        self._own = self._connected()
        try:
            resources = Counter[str]()
            for node in self._ray.nodes():
                resources.update(node["Resources"] if node["Alive"] else {})
            self.device = options.wanted_device or ("cuda" if resources["GPU"] else "cpu")
            self._look()
            self._divide()
        except BaseException:
            self.close()
            raise

    def _connected(self) -> bool:
        """Connect, to a cluster started here where there is none; returns whether this process is to disconnect."""
        ray, address = self._ray, os.environ.get("RAY_ADDRESS", "")
        if ray.is_initialized():
            return False
        if "://" in address:
            remedy = "Run the search inside of the cluster: ray job submit -- autofit search ..."
            raise InputError(
                f"RAY_ADDRESS is {address}, a client's address, which is not made for this.", remedy
            )
        if matched := _HOST_AND_PORT.fullmatch(address):  # Ray itself waits for minutes, and prints
            try:
                socket.create_connection((matched[1], int(matched[2])), _ANSWER_SECONDS).close()
            except OSError as error:
                raise ProbeError(
                    f"no Ray cluster answers at RAY_ADDRESS={address}.", "See ray status."
                ) from error
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            try:
                ray.init(include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
            except ValueError:  # there is a cluster, which has a size
                ray.init(**quiet)
        except (ConnectionError, ray.exceptions.RayError, RuntimeError) as error:
            message = f"the Ray cluster cannot be reached{address and f' at RAY_ADDRESS={address}'}: {error}"
            raise ProbeError(message.splitlines()[0], "See ray status.") from error
        return True

    def _look(self, *, again: bool = True) -> None:
        """Learn which nodes there are, and look at those that have come; at most every few seconds unless `again`."""
        with self._looking:
            if not again and time.monotonic() - self._looked < _LOOK_AGAIN:
                return
            what = "GPU" if self.device == "cuda" else "CPU"
            nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
            self._alive = set(nodes)
            unknown = self._alive - self._alike.keys() - self._left_out
            found = self._surveyed(
                [name for name in nodes if name in unknown and nodes[name]["Resources"].get(what)]
            )
            fine = [_seen(nodes[name], what, processor) for name, (_, processor) in found.items()]
            wrong = {node.id: _differing(found[node.id][0]) for node in fine}
            for node in filter(lambda each: wrong[each.id], fine):
                self._leave_out(node, f"{wrong[node.id]}.")
            fine = [node for node in fine if not wrong[node.id]]
            self._kind = self._kind or self._chosen(fine)
            self._alike |= {node.id: node for node in fine if node.kind == self._kind}
            for node in fine:
                if node.kind != self._kind:
                    self._leave_out(
                        node,
                        f"speeds on {node.kind} cannot be compared with those on {self._kind}.",
                    )
            self._looked = time.monotonic()

    def _surveyed(self, names: Sequence[str]) -> dict[str, Found]:
        """What is found on each node, but those that are gone again."""
        ray = self._ray
        survey = ray.remote(num_cpus=0)(_survey())
        on = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        asked = {
            name: survey.options(scheduling_strategy=on(name, soft=False)).remote()
            for name in names
        }
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_SURVEY_SECONDS)
        found: dict[str, Found] = {}
        for name, answer in asked.items():
            try:
                found[name] = ray.get(answer, timeout=0)
            except ray.exceptions.RayError:
                self._looked = -math.inf
        return found

    def _leave_out(self, node: _Node, why: str) -> None:
        """Never use a node; a ProbeError for other versions on one that was there before anything ran."""
        if not self._kind:
            message = f"the node {node.address} of the Ray cluster has {why}"
            raise ProbeError(
                message, "Give all nodes the same Python, torch and autofit, as one image does."
            )
        self._left_out.add(node.id)
        self._notify(f"the node {node.address} is left idle: {why}")

    def _chosen(self, nodes: Sequence[_Node]) -> str:
        """The kind that --gpu names, else that of which there is most; empty where there is none."""
        amounts = Counter[str]()
        for node in nodes:
            amounts[node.kind] += node.amount
        asked = _plain(self._options.gpu or "")
        named = [kind for kind in amounts if _plain(kind) in asked]
        return max(named or amounts, key=lambda kind: (amounts[kind], kind), default="")

    def _divide(self) -> None:
        """Decide what a gang takes; an InputError where no node has so much, a ProbeError where none has anything."""
        options, amounts = self._options, [node.amount for node in self._alike.values()]
        on_cpu = self.device == "cpu"
        if not amounts:
            message = (
                f"no node of the Ray cluster has a {'processor for tasks' if on_cpu else 'GPU'}."
            )
            raise (ProbeError if on_cpu else NoDeviceError)(message, "See ray status.")
        if options.devices == ALL and on_cpu:
            raise InputError(
                "--devices all means cards, and the device is the CPU.",
                "Give a number: --devices 2.",
            )
        self.devices = min(amounts) if options.devices == ALL else int(options.devices)
        self.nodes, self.world = options.nodes, self.devices * options.nodes
        # Processors of a node are divided by all that train there at once; by default it has one gang.
        gangs = math.ceil((options.workers or 1) * self.nodes / len(amounts)) if on_cpu else 1
        self.sharing = self.devices * gangs
        self.processors = min(amounts) // self.sharing if on_cpu else 0
        if min(amounts) < self.sharing:
            what = "processors" if on_cpu else "cards"
            message = f"{self.sharing} {what} of a node are needed, and the cluster's have {min(amounts)} each."
            raise InputError(message, "Give fewer --devices, or fewer --workers.")

    def free_slots(self) -> int:
        """How many gangs there is room for, at least 1; what others take of it is not known."""
        self._look(again=False)
        slots = self._slots()
        most = sum(slots) // self.nodes
        # a gang has one on each of its nodes
        while sum(min(slot, most) for slot in slots) < most * self.nodes:
            most -= 1
        return max(1, min(most, self._options.workers or most))

    @property
    def shares_nodes(self) -> bool:
        """Whether a node has room for several gangs."""
        return max(self._slots(), default=0) > 1

    def _slots(self) -> list[int]:
        """For how many gangs each node has room."""
        each = (self.processors or 1) * self.devices
        return [node.amount // each for node in self._alike.values() if node.id in self._alive]

    def describe(self) -> str:
        """A sentence on what is used."""
        count, nodes = self.free_slots(), pluralize(len(self._alike), "node")
        at_once = f"{count} probes run at a time" if count > 1 else "one probe runs at a time"
        return f"{at_once} on a Ray cluster of {nodes} with {self._kind}."

    def take(self, given_up: threading.Event) -> Gang:
        """A gang that is idle, or a new one as soon as there is room; a ProbeError where there is none in time, or the
        wait was given up."""
        began, group = time.monotonic(), None
        try:
            while not given_up.is_set():
                with self._lock:
                    if self._idle:
                        return self._idle.pop()
                group = group or self._asked()
                if group.wait(_POLL):
                    placed, group = group, None
                    if gang := self._started(placed, given_up):
                        return gang
                self._tell_waiting(began)
        finally:
            if group is not None:
                self._ray.util.remove_placement_group(group)
        raise ProbeError("probes were given up.")

    def give_back(self, gang: Gang) -> None:
        """Have a gang idle for the next one who takes it."""
        with self._lock:
            self._idle.append(gang)

    def end(self, gangs: Sequence[Gang]) -> None:
        """End gangs, also those of which nodes are lost, and free what they take."""
        ray = self._ray
        for gang in gangs:
            gang.executor.close()
        actors = [worker.actor for gang in gangs for worker in gang.workers]
        if ended := [actor.close.remote() for actor in actors]:
            ray.wait(ended, num_returns=len(ended), timeout=_END_SECONDS)
        self._free(
            actors, [gang.group for gang in gangs], [part for gang in gangs for part in gang.parts]
        )

    def end_idle(self, but: int = 0) -> None:
        """End the idle gangs, all but so many."""
        with self._lock:
            self._idle, ended = self._idle[:but], self._idle[but:]
        self.end(ended)

    def close(self) -> None:
        """End the idle gangs, and the connection; safe to call twice."""
        if self._ray.is_initialized():
            self.end_idle()
            if self._own:
                self._ray.shutdown()

    def _free(
        self, actors: Sequence[Any], groups: Sequence[Any], parts: Sequence[tuple[str, int]]
    ) -> None:
        for actor in actors:
            self._ray.kill(actor)
        for group in groups:
            self._ray.util.remove_placement_group(group)
        with self._lock:
            for node, part in parts:
                self._parts[node].discard(part)

    def _asked(self) -> Any:
        """A placement group for a gang, which is there once there is room."""
        bundle = (
            {"CPU": self.processors * self.devices} if self.processors else {"GPU": self.devices}
        )
        given: dict[str, Any] = {"strategy": "STRICT_SPREAD" if self.nodes > 1 else "STRICT_PACK"}
        if self._left_out:
            without = {"ray.io/node-id": f"!in({','.join(sorted(self._left_out))})"}
            given["bundle_label_selector"] = [without] * self.nodes
        return self._ray.util.placement_group([bundle] * self.nodes, **given)

    def _started(self, group: Any, given_up: threading.Event) -> Gang | None:
        """The gang in a placement group; None where a node of that is unlike the others, or gone again."""
        ray = self._ray
        placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
        nodes = [placed[rank // self.devices] for rank in range(self.world)]
        parts = [(node, self._part(node)) for node in nodes]
        actors: list[Any] = []
        try:
            if set(nodes) - self._alike.keys():  # which have joined since
                self._look()
            if set(nodes) - self._alike.keys():
                raise LostError("a node of the cluster is unlike the others.")
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            zygote = ray.remote(
                max_concurrency=4, num_cpus=self.processors, num_gpus=int(not self.processors)
            )(Zygote)
            for rank in range(self.world):
                where = place(group, placement_group_bundle_index=rank // self.devices)
                actors.append(
                    zygote.options(scheduling_strategy=where).remote(str(Path.cwd()), sys.path)
                )
            begun = [
                actors[rank].begin.remote(rank, parts[rank][1], self.sharing)
                for rank in range(self.world)
            ]
            while ray.wait(begun, num_returns=len(begun), timeout=_POLL)[1]:
                if given_up.is_set():
                    raise LostError("probes were given up.")
                self._look(again=False)
                # Ray waits for room elsewhere, which gangs that are idle here may take
                if set(nodes) - self._alive:
                    raise LostError("a node of the cluster was lost.")
            ray.get(begun)
        except BaseException as error:
            self._free(actors, [group], parts)
            if not isinstance(error, (LostError, ray.exceptions.RayError)):
                raise
            self._failures += not isinstance(error, LostError)
            if self._failures < _FAILURES:
                return None
            raise ProbeError(
                f"probes cannot be started on the Ray cluster: {_told(error)}", "See ray logs."
            ) from error
        self._failures = 0
        workers = [FarWorker(actor, self._logs, self._options.probe_timeout) for actor in actors]
        if self.world == 1:
            return Gang(group, parts, workers, workers[0])
        host = self._alike[nodes[0]].address
        return Gang(group, parts, workers, FarGang(workers, host, self._options.probe_timeout))

    def _part(self, node: str) -> int:
        """A part of a node that nobody has yet, and is taken from now on."""
        with self._lock:
            part = next(
                each for each in range(len(self._parts[node]) + 1) if each not in self._parts[node]
            )
            self._parts[node].add(part)
        return part

    def _tell_waiting(self, began: float) -> None:
        """Tell now and then that there is no room; a ProbeError once there is no more time."""
        now = time.monotonic()
        each = (
            f"{self.processors * self.devices} processors"
            if self.processors
            else pluralize(self.devices, "card")
        )
        what = f"{each} of {pluralize(self.nodes, 'node')}"
        if now > self._until:
            remedy = "See ray status. What was measured is kept: continue with --resume."
            raise ProbeError(
                f"the Ray cluster had no room for a probe ({what}) within the time limit.", remedy
            )
        if now - began > _PATIENT and now - self._told > _TELL_AGAIN:
            self._told = now
            self._notify(f"the Ray cluster is full: a probe waits for {what}.")


def _imported() -> Any:
    """Ray itself. Raises InputError where it is not installed."""
    try:
        import ray.util.scheduling_strategies
    except ImportError as error:
        remedy = "Install it with pip install 'torch-autofit[cluster]'."
        raise InputError("probes on a cluster need Ray, which is not installed.", remedy) from error
    return ray


def _survey() -> Callable[[], Found]:
    """What looks at a node: sent as it stands, since the node may lack autofit."""

    def found() -> Found:
        versions: dict[str, str | None] = {
            "python": platform.python_version(),
            "torch": None,
            "autofit": None,
        }
        with contextlib.suppress(ImportError):
            versions["torch"] = importlib.metadata.version("torch")
        with contextlib.suppress(ImportError):
            versions["autofit"] = importlib.import_module("autofit").__version__
        with Path("/proc/cpuinfo").open() as file:
            models = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return versions, models[0] if models else platform.machine()

    return found


def _seen(node: dict[str, Any], what: str, processor: str) -> _Node:
    resources = node["Resources"]
    amount = int(resources[what])
    cards = sorted(
        name.removeprefix("accelerator_type:")
        for name in resources
        if name.startswith("accelerator_type:")
    )
    kind = (
        (cards or ["unnamed cards"])[0]
        if what == "GPU"
        else f"{pluralize(amount, 'processor')} of {processor}"
    )
    return _Node(node["NodeID"], node["NodeManagerAddress"], kind, amount)


def _differing(found: dict[str, str | None]) -> str:
    """What differs from here, in words; empty where nothing does."""
    here = versions()
    other = [name for name in _COMPARED if _public(name, found[name]) != _public(name, here[name])]
    return " and ".join(
        f"{name} {found[name]} instead of {here[name]}" if found[name] else f"no {name}"
        for name in other
    )


def _public(name: str, version: str | None) -> str:
    """What counts of a version: not what it was built for, since the node that searches need have no card."""
    public = (version or "").partition("+")[0]
    return public.rpartition(".")[0] if name == "python" else public


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _told(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
