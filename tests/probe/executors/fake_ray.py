"""A Ray within this process: nodes that come and go, placement groups, tasks and actors in threads. It answers what
autofit asks of the real one, of which test_on_ray.py asks the same where that is installed."""

import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from autofit.probe.executors import local
from autofit.probe.executors.far import Zygote
from tests import warm
from tests.probe.bare import FIRST

_STARTING = threading.RLock()  # what a zygote starts with is of the whole process


class RayError(Exception):
    """A node or an actor is gone."""


class Reference:
    """What a call of Ray returns at once."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.answer


class Actor:
    """A Zygote; its methods are called as `actor.name.remote(...)`."""

    def __init__(self, node: str, arguments: tuple[Any, ...]) -> None:
        self.node, self.dead = node, False
        self._zygote = Zygote(*arguments)
        self._threads = ThreadPoolExecutor(4)
        self._asked: list[Reference] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: self._call(getattr(self._zygote, name), arguments)
        )

    def _call(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Reference:
        reference = Reference()
        self._asked.append(reference)

        def work() -> None:
            try:
                with _started_bare() if method.__name__ == "begin" else threading.Lock():
                    answer = method(*arguments)
                if not self.dead:
                    reference.answer.set_result(answer)
            except Exception as error:
                if not self.dead:
                    reference.answer.set_exception(RayError(str(error)))

        if self.dead:
            reference.answer.set_exception(RayError("the actor died"))
        else:
            self._threads.submit(work)
        return reference

    def kill(self) -> None:
        if self.dead:
            return
        self.dead = True
        for reference in self._asked:
            if not reference.answer.done():
                reference.answer.set_exception(RayError("the actor died"))
        if begun := getattr(self._zygote, "_local", None):
            begun.give_up()
        self._threads.shutdown()
        if begun := getattr(self._zygote, "_local", None):  # which may have begun meanwhile
            begun.close()


@contextmanager
def _started_bare() -> Iterator[None]:
    """Inside, zygotes import no library, and leave the environment of this process as it is."""
    with (
        _STARTING,
        mock.patch.dict(os.environ),
        warm.zygotes(),
        mock.patch.object(local, "START", FIRST + local.START),
    ):
        yield


class Group:
    """A placement group: bundles of resources, on nodes once there is room."""

    def __init__(
        self, ray: "FakeRay", bundles: Sequence[dict[str, int]], strategy: str, without: str
    ) -> None:
        self.ray, self.bundles, self.spread, self.without = (
            ray,
            bundles,
            strategy == "STRICT_SPREAD",
            without,
        )
        self.nodes: list[str] = []

    def wait(self, seconds: float) -> bool:
        with self.ray.changed:
            return self.ray.changed.wait_for(self._placed, seconds)

    def _placed(self) -> bool:
        if self.nodes:
            return True
        found: list[str] = []
        for bundle in self.bundles:
            free = [
                name for name in self.ray.alive if name not in self.without and name not in found * self.spread
                if all(self.ray.free(name)[what] >= amount for what, amount in bundle.items())
            ]  # fmt: skip
            found += free[:1]
        self.nodes = found if len(found) == len(self.bundles) else []
        return bool(self.nodes)


class FakeRay:
    """The module. `nodes`: how many processors or cards each has: {"a": {"CPU": 2}}."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, **nodes: dict[str, float]) -> None:
        self.alive = dict(nodes)
        self.changed = threading.Condition()
        self.actors: list[Actor] = []
        self.groups: list[Group] = []
        # of nodes, where they are not those here
        self.versions: dict[str, dict[str, str | None]] = {}
        self._count = itertools.count()
        strategies = SimpleNamespace(
            NodeAffinitySchedulingStrategy=lambda node, soft: node,
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                group.nodes[placement_group_bundle_index]
            ),
        )
        self.util = SimpleNamespace(
            placement_group=self._group,
            remove_placement_group=self._remove,
            placement_group_table=lambda group: {
                "bundles_to_node_id": dict(enumerate(group.nodes))
            },
            scheduling_strategies=strategies,
        )

    @contextmanager
    def installed(self) -> Iterator["FakeRay"]:
        """Inside, `import ray` finds this."""
        with mock.patch.dict(
            sys.modules,
            {"ray": self, "ray.util": self.util, "ray.util.scheduling_strategies": self},
        ):
            yield self

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "Alive": True,
                "NodeManagerAddress": "127.0.0.1",
                "Resources": dict(resources),
            }
            for name, resources in self.alive.items()
        ]

    def free(self, node: str) -> Counter[str]:
        left = Counter[str]({what: int(amount) for what, amount in self.alive[node].items()})
        for group in self.groups:
            for name, bundle in zip(group.nodes, group.bundles, strict=False):
                if name == node:
                    left.subtract(bundle)
        return left

    def join(self, **nodes: dict[str, float]) -> None:
        with self.changed:
            self.alive |= nodes
            self.changed.notify_all()

    def lose(self, node: str) -> None:
        """A node dies, and all that runs there."""
        with self.changed:
            del self.alive[node]
        for actor in self.actors:
            if actor.node == node:
                actor.kill()

    def _group(
        self, bundles: Any, strategy: str, bundle_label_selector: Sequence[dict[str, str]] = ()
    ) -> Group:
        without = bundle_label_selector[0]["ray.io/node-id"] if bundle_label_selector else ""
        group = Group(self, bundles, strategy, without)
        with self.changed:
            self.groups.append(group)
        return group

    def _remove(self, group: Group) -> None:
        with self.changed:
            self.groups.remove(group)
            self.changed.notify_all()

    def remote(self, what: Any = None, **_: Any) -> Any:
        if what is None:
            return lambda function: self.remote(function)
        return SimpleNamespace(
            options=lambda scheduling_strategy: self._on(scheduling_strategy, what)
        )

    def _on(self, node: str, what: Any) -> Any:
        def remote(*arguments: Any) -> Any:
            if what is Zygote:
                self.actors.append(Actor(node, arguments))
                return self.actors[-1]
            versions, processor = what()
            reference = Reference()
            reference.answer.set_result((versions | self.versions.get(node, {}), processor))
            return reference

        return SimpleNamespace(remote=remote)

    def wait(
        self, references: Sequence[Reference], num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        done = wait([each.answer for each in references], timeout).done
        return [each for each in references if each.answer in done], [
            each for each in references if each.answer not in done
        ]

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, list):
            return [each.answer.result() for each in references]
        return references.answer.result(timeout)

    def kill(self, actor: Actor) -> None:
        actor.kill()
