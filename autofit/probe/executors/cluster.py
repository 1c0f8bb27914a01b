"""A Ray cluster as a search sees it: which of its nodes are alike, how many gangs they have room
for, and the gangs.

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
# Seconds.
_POLL = 0.2
_LOOK_AGAIN = 2.0
_TELL_AGAIN = 60.0
_SURVEY_SECONDS = 120.0
_END_SECONDS = 15.0
_ANSWER_SECONDS = 10.0
_PATIENT = 3.0  # of waiting for room, before that is said
_FAILURES = 3  # gangs that did not start, one after another, until that is not their nodes' fault

_HOST_AND_PORT = re.compile(r"(.+):(\d+)")
_CARD_TYPE = "accelerator_type:"  # before the name of a node's card, among its resources

Found = tuple[dict[str, str | None], str]  # versions of what is compared, and the processor


@dataclass(frozen=True)
class _Node:
    """A node that has what a search wants.

    Attributes:
        kind: its card, or its processors.
        amount: how many of these it has.
    """

    id: str
    address: str
    kind: str
    amount: int


@dataclass(eq=False)
class Gang:
    """One place of a cluster.

    Attributes:
        parts: of which node each rank has which part.
        executor: measures there.
    """

    group: Any
    parts: list[tuple[str, int]]
    workers: list[FarWorker]
    executor: FarWorker | FarGang


class Cluster:
    """A connection to a Ray cluster, and what this process has there.

    Several threads may call its methods.

    Args:
        until: the time, of time.monotonic(), to wait for room.

    Raises:
        InputError: Ray is not installed, or the wrong one is named; ProbeError: the cluster cannot
        be used.
    """

    def __init__(
        self, options: SearchOptions, logs: Path, notify: Callable[[str], None], until: float
    ) -> None:
        self._ray = _imported()
        self._options = options
        self._logs = logs
        self._notify = notify
        self._until = until
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._idle: list[Gang] = []
        self._parts: defaultdict[str, set[int]] = defaultdict(set)  # of each node that are in use
        self._alike: dict[str, _Node] = {}
        self._left_out: set[str] = set()  # nodes of another kind, or with other versions
        self._alive: set[str] = set()
        self._looked_at = -math.inf
        self._noted_at = -math.inf
        self._failures = 0
        self._kind = ""
        self._own = self._connected()
        try:
            self.device = options.wanted_device or self._best_device()
            self._look()
            self._divide()
        except BaseException:
            self.close()
            raise

    def _best_device(self) -> str:
        """Cards where any node has one."""
        for node in self._ray.nodes():
            if node["Alive"] and node["Resources"].get("GPU"):
                return "cuda"
        return "cpu"

    def _connected(self) -> bool:
        """Connect, to a cluster started here where there is none.

        Returns:
            Whether this process is to disconnect.
        """
        ray = self._ray
        if ray.is_initialized():
            return False

        address = os.environ.get("RAY_ADDRESS", "")
        if "://" in address:
            raise InputError(
                f"RAY_ADDRESS is {address}, a client's address, which is not made for this.",
                "Run the search inside of the cluster: ray job submit -- autofit search ...",
            )
        _check_address(address)

        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            try:
                ray.init(include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
            except ValueError:  # there is a cluster, which has a size
                ray.init(**quiet)
        except (ConnectionError, ray.exceptions.RayError, RuntimeError) as error:
            where = f" at RAY_ADDRESS={address}" if address else ""
            message = f"the Ray cluster cannot be reached{where}: {error}"
            raise ProbeError(message.splitlines()[0], "See ray status.") from error

        return True

    def _look(self, *, again: bool = True) -> None:
        """Learn which nodes there are, and survey those that have come.

        Args:
            again: whether also where that was done a moment ago.
        """
        with self._looking:
            if not again and time.monotonic() - self._looked_at < _LOOK_AGAIN:
                return

            what = "GPU" if self.device == "cuda" else "CPU"
            nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
            self._alive = set(nodes)
            unknown = self._alive - self._alike.keys() - self._left_out
            names = [name for name in nodes if name in unknown]
            found = self._surveyed([name for name in names if nodes[name]["Resources"].get(what)])

            usable = []
            for name, (found_versions, processor) in found.items():
                node = _node(nodes[name], what, processor)
                difference = _difference(found_versions)
                if difference:
                    self._leave_out(node, f"{difference}.")
                else:
                    usable.append(node)

            self._kind = self._kind or self._chosen(usable)
            for node in usable:
                if node.kind == self._kind:
                    self._alike[node.id] = node
                else:
                    self._leave_out(
                        node,
                        f"speeds on {node.kind} cannot be compared with those on {self._kind}.",
                    )
            self._looked_at = time.monotonic()

    def _surveyed(self, names: Sequence[str]) -> dict[str, Found]:
        """What is found on each node, but those that are gone again."""
        ray = self._ray
        survey = ray.remote(num_cpus=0)(_survey())
        on = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        asked = {}
        for name in names:
            asked[name] = survey.options(scheduling_strategy=on(name, soft=False)).remote()
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_SURVEY_SECONDS)

        found: dict[str, Found] = {}
        for name, answer in asked.items():
            try:
                found[name] = ray.get(answer, timeout=0)
            except ray.exceptions.RayError:
                self._looked_at = -math.inf
        return found

    def _leave_out(self, node: _Node, why: str) -> None:
        """Never use a node.

        Raises ProbeError for other versions on one that was there before anything ran.
        """
        if not self._kind:
            raise ProbeError(
                f"the node {node.address} of the Ray cluster has {why}",
                "Give all nodes the same Python, torch and autofit, as one image does.",
            )

        self._left_out.add(node.id)
        self._notify(f"the node {node.address} is left idle: {why}")

    def _chosen(self, nodes: Sequence[_Node]) -> str:
        """The kind that --gpu names, else the one with the most; empty where there is none."""
        amounts = Counter[str]()
        for node in nodes:
            amounts[node.kind] += node.amount
        asked = _plain(self._options.gpu or "")
        named = [kind for kind in amounts if _plain(kind) in asked]
        return max(named or amounts, key=lambda kind: (amounts[kind], kind), default="")

    def _divide(self) -> None:
        """Decide what a gang takes.

        Raises:
            InputError: no node has so much; ProbeError: none has anything.
        """
        options = self._options
        on_cpu = self.device == "cpu"
        if not self._alike:
            if on_cpu:
                raise ProbeError(
                    "no node of the Ray cluster has a processor for tasks.", "See ray status."
                )
            raise NoDeviceError("no node of the Ray cluster has a GPU.", "See ray status.")
        least = min(node.amount for node in self._alike.values())

        if options.devices != ALL:
            self.devices = int(options.devices)
        elif on_cpu:
            raise InputError(
                "--devices all means cards, and the device is the CPU.",
                "Give a number: --devices 2.",
            )
        else:
            self.devices = least
        self.nodes = options.nodes
        self.world = self.devices * self.nodes

        self.sharing = self.devices
        self.processors = 0
        if on_cpu:
            # A node's processors are divided by all that train there at once, by default one gang.
            gangs = math.ceil((options.workers or 1) * self.nodes / len(self._alike))
            self.sharing *= gangs
            self.processors = least // self.sharing
        if least < self.sharing:
            what = "processors" if on_cpu else "cards"
            raise InputError(
                f"{self.sharing} {what} of a node are needed, and the cluster's have {least} each.",
                "Give fewer --devices, or fewer --workers.",
            )

    def free_slots(self) -> int:
        """How many gangs there is room for, at least 1; what others take of it is not known."""
        self._look(again=False)
        slots = self._slots()
        most = sum(slots) // self.nodes
        # A gang takes one slot on each of its nodes.
        while sum(min(slot, most) for slot in slots) < most * self.nodes:
            most -= 1
        return max(1, min(most, self._options.workers or most))

    @property
    def shares_nodes(self) -> bool:
        """Whether a node has room for several gangs."""
        return max(self._slots(), default=0) > 1

    def _slots(self) -> list[int]:
        """For how many gangs each node has room."""
        taken = (self.processors or 1) * self.devices
        return [node.amount // taken for node in self._alike.values() if node.id in self._alive]

    def describe(self) -> str:
        """A sentence on what is used."""
        count = self.free_slots()
        at_once = f"{count} probes run at a time" if count > 1 else "one probe runs at a time"
        nodes = pluralize(len(self._alike), "node")
        return f"{at_once} on a Ray cluster of {nodes} with {self._kind}."

    def take(self, given_up: threading.Event) -> Gang:
        """A gang that is idle, or a new one as soon as there is room.

        Raises ProbeError where there is no room in time, or the wait was given up.
        """
        began = time.monotonic()
        group = None
        try:
            while not given_up.is_set():
                with self._lock:
                    if self._idle:
                        return self._idle.pop()

                group = group or self._asked()
                if group.wait(_POLL):
                    placed = group
                    group = None
                    gang = self._started(placed, given_up)
                    if gang:
                        return gang
                self._note_waiting(began)
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
        actors = []
        groups = []
        parts = []
        for gang in gangs:
            gang.executor.close()
            actors += [worker.actor for worker in gang.workers]
            groups.append(gang.group)
            parts += gang.parts

        ended = [actor.close.remote() for actor in actors]
        if ended:
            self._ray.wait(ended, num_returns=len(ended), timeout=_END_SECONDS)
        self._free(actors, groups, parts)

    def end_idle(self, but: int = 0) -> None:
        """End the idle gangs, all but so many."""
        with self._lock:
            ended = self._idle[but:]
            del self._idle[but:]
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
        bundle = {"GPU": self.devices}
        if self.processors:
            bundle = {"CPU": self.processors * self.devices}
        given: dict[str, Any] = {"strategy": "STRICT_SPREAD" if self.nodes > 1 else "STRICT_PACK"}
        if self._left_out:
            without = {"ray.io/node-id": f"!in({','.join(sorted(self._left_out))})"}
            given["bundle_label_selector"] = [without] * self.nodes
        return self._ray.util.placement_group([bundle] * self.nodes, **given)

    def _started(self, group: Any, given_up: threading.Event) -> Gang | None:
        """The gang in a placement group.

        None where a node of the group is unlike the others, or gone again.
        """
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

            begun = []
            for rank, actor in enumerate(actors):
                _, part = parts[rank]
                begun.append(actor.begin.remote(rank, part, self.sharing))
            while ray.wait(begun, num_returns=len(begun), timeout=_POLL)[1]:
                if given_up.is_set():
                    raise LostError("probes were given up.")
                self._look(again=False)
                # Ray waits for room elsewhere, which gangs that are idle here may take.
                if set(nodes) - self._alive:
                    raise LostError("a node of the cluster was lost.")
            ray.get(begun)
        except BaseException as error:
            self._free(actors, [group], parts)
            if isinstance(error, ray.exceptions.RayError):
                self._failures += 1
            elif not isinstance(error, LostError):
                raise
            if self._failures < _FAILURES:
                return None
            raise ProbeError(
                f"probes cannot be started on the Ray cluster: {_last_line(error)}",
                "See ray logs.",
            ) from error

        self._failures = 0
        timeout = self._options.probe_timeout
        workers = [FarWorker(actor, self._logs, timeout) for actor in actors]
        if self.world == 1:
            return Gang(group, parts, workers, workers[0])
        host = self._alike[nodes[0]].address
        return Gang(group, parts, workers, FarGang(workers, host, timeout))

    def _part(self, node: str) -> int:
        """A part of a node that nobody has yet, and is taken from now on."""
        with self._lock:
            taken = self._parts[node]
            part = 0
            while part in taken:
                part += 1
            taken.add(part)
        return part

    def _note_waiting(self, began: float) -> None:
        """Say now and then that there is no room; a ProbeError once there is no more time."""
        now = time.monotonic()
        what = pluralize(self.devices, "card")
        if self.processors:
            what = f"{self.processors * self.devices} processors"
        what += f" of {pluralize(self.nodes, 'node')}"

        if now > self._until:
            raise ProbeError(
                f"the Ray cluster had no room for a probe ({what}) within the time limit.",
                "See ray status. What was measured is kept: continue with --resume.",
            )
        if now - began > _PATIENT and now - self._noted_at > _TELL_AGAIN:
            self._noted_at = now
            self._notify(f"the Ray cluster is full: a probe waits for {what}.")


def _imported() -> Any:
    """Ray itself. Raises InputError where it is not installed."""
    try:
        import ray.util.scheduling_strategies
    except ImportError as error:
        remedy = "Install it with pip install 'torch-autofit[cluster]'."
        raise InputError("probes on a cluster need Ray, which is not installed.", remedy) from error
    return ray


def _check_address(address: str) -> None:
    """Raise a ProbeError where nobody answers at a host and port: Ray itself waits for minutes, and
    prints."""
    matched = _HOST_AND_PORT.fullmatch(address)
    if not matched:
        return

    host, port = matched.groups()
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except OSError as error:
        raise ProbeError(
            f"no Ray cluster answers at RAY_ADDRESS={address}.", "See ray status."
        ) from error


def _survey() -> Callable[[], Found]:
    """What surveys a node: sent as it stands, since the node may lack autofit."""

    def found() -> Found:
        versions: dict[str, str | None] = dict.fromkeys(("python", "torch", "autofit"))
        versions["python"] = platform.python_version()
        with contextlib.suppress(ImportError):
            versions["torch"] = importlib.metadata.version("torch")
        with contextlib.suppress(ImportError):
            versions["autofit"] = importlib.import_module("autofit").__version__

        processor = platform.machine()
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                if line.startswith("model name"):
                    processor = line.split(":", 1)[1].strip()
                    break
        return versions, processor

    return found


def _node(node: dict[str, Any], what: str, processor: str) -> _Node:
    """A node as Ray describes it, on which that processor was found."""
    resources = node["Resources"]
    amount = int(resources[what])
    if what == "GPU":
        cards = [name for name in resources if name.startswith(_CARD_TYPE)]
        kind = min(cards, default="unnamed cards").removeprefix(_CARD_TYPE)
    else:
        kind = f"{pluralize(amount, 'processor')} of {processor}"
    return _Node(node["NodeID"], node["NodeManagerAddress"], kind, amount)


def _difference(found: dict[str, str | None]) -> str:
    """What differs from here, in words; empty where nothing does."""
    here = versions()
    differences = []
    for name in _COMPARED:
        if not found[name]:
            differences.append(f"no {name}")
        elif _public(name, found[name]) != _public(name, here[name]):
            differences.append(f"{name} {found[name]} instead of {here[name]}")
    return " and ".join(differences)


def _public(name: str, version: str | None) -> str:
    """What counts of a version: not what it was built for, since the node that searches need have
    no card."""
    public = (version or "").partition("+")[0]
    if name == "python":
        return public.rpartition(".")[0]
    return public


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
