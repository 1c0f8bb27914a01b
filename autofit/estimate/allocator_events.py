"""The allocator's view of a run: two whole steps, put together from a trace of one micro-batch and one update.

What must be reserved depends on long-lived blocks between short-lived ones: cuBLAS takes its workspaces at the first
products, the gradients of a step's first micro-batch stay where they were made while those of the second are added, and
the optimizer makes its state in the first update, in whatever the backward has left free.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from autofit.core.hardware import Hardware
from autofit.estimate.fake_device import workspace_bytes
from autofit.estimate.peak import rounded
from autofit.estimate.trace import Trace

_Events = list[tuple[int, int]]  # (storage, bytes; 0: it is freed)
_STEPS = 2
_NEAR = 4  # events around the moment when a gradient is complete, among which the added one is freed


def two_steps(traced: Trace, hardware: Hardware) -> Iterator[tuple[int, int]]:
    """The allocations and frees of two steps, from building the model on: (storage, bytes), 0 for a free."""
    return _Run.of(traced, hardware).events()


@dataclass(frozen=True)
class _Run:
    """The parts of a trace that a run consists of.

    Attributes:
        lasting: the storages with a single life: weights, inputs and optimizer state.
        added: gradients that are added to earlier ones and freed; empty where nothing is accumulated.
        workspaces: (events of the step before it, bytes) of what the first products take and never free.
        unused: the first number that no storage has.
    """

    build: _Events
    inputs: _Events
    state: _Events
    step: _Events
    update: _Events
    lasting: Set[int]
    added: Set[int]
    workspaces: tuple[tuple[int, int], ...]
    unused: int

    @classmethod
    def of(cls, traced: Trace, hardware: Hardware) -> _Run:
        events = list(rounded(traced, hardware))
        starts = {mark.phase: mark.events for mark in reversed(traced.marks)}
        built, begun = starts["state"], starts["forward"]
        updated = starts.get("update", len(events))
        before = {
            name: [event for event in events[built:begun] if traced.labels.get(event[0]) == name]
            for name in ("inputs", "optimizer", "gradients")
        }
        gradients = {storage for storage, _ in before["gradients"]}
        lasting = {storage for storage, _ in (*events[:built], *before["inputs"], *before["optimizer"])}
        added = _added(events, traced, gradients, lasting)
        if gradients and not added:  # the trace shows no addition: they exist from the start
            before["inputs"] += before["gradients"]
            lasting |= gradients
        workspace = workspace_bytes(hardware) // 2
        products = sorted(traced.products[phase] for phase in ("forward", "backward") if phase in traced.products)
        return cls(
            build=events[:built],
            inputs=before["inputs"],
            state=before["optimizer"],
            step=events[begun:updated],
            update=events[updated:],
            lasting=lasting,
            added=added,
            workspaces=tuple((max(0, event - begun), workspace) for event in products if workspace),
            unused=1 + max((storage for storage, _ in events), default=0),
        )

    def events(self) -> Iterator[tuple[int, int]]:
        """The run, in order."""
        numbers = itertools.count(self.unused)
        yield from self.build
        yield from self.inputs
        for step in range(_STEPS):
            gradients: list[int] = []
            alive: dict[int, int] = {}
            first = self.step if step else self._with_workspaces(numbers)
            yield from self._renumbered(first, numbers, alive, retained=gradients if self.added else None)
            if self.added:
                yield from _freed(alive)
                yield from self._renumbered(self.step, numbers, alive)
                yield from _freed(alive)
            yield from self._renumbered(self.update if step else self.state, numbers, alive)
            yield from _freed(alive)
            yield from ((number, 0) for number in gradients)

    def _with_workspaces(self, numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
        done = 0
        for event, nbytes in self.workspaces:
            yield from self.step[done:event]
            yield -next(numbers), nbytes  # a number of its own, and below 0: it is never freed
            done = event
        yield from self.step[done:]

    def _renumbered(
        self,
        events: Iterable[tuple[int, int]],
        numbers: Iterator[int],
        alive: dict[int, int],
        *,
        retained: list[int] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Events with new numbers, collected in `alive`, for what does not last.

        What would be added is `retained` instead, where there is nothing to add it to yet.
        """
        for storage, nbytes in events:
            if nbytes and storage >= 0 and storage not in self.lasting and storage not in alive:
                alive[storage] = next(numbers)
            if retained is not None and nbytes == 0 and storage in self.added and storage in alive:
                retained.append(alive.pop(storage))
                continue
            yield alive.get(storage, storage), nbytes
            if nbytes == 0:
                alive.pop(storage, None)


def _freed(alive: dict[int, int]) -> Iterator[tuple[int, int]]:
    for number in alive.values():
        yield number, 0
    alive.clear()


def _added(events: _Events, traced: Trace, gradients: Set[int], lasting: Set[int]) -> set[int]:
    """The storages that are freed once they are added to these gradients."""
    sizes = {storage: nbytes for storage, nbytes in events if nbytes}
    added: set[int] = set()
    for gradient, moment in traced.completed.items():
        if gradient in gradients:
            for storage, nbytes in events[max(0, moment - _NEAR) : moment + _NEAR]:
                same_size = sizes.get(storage) == sizes.get(gradient)
                if nbytes == 0 and same_size and storage not in lasting | gradients | added:
                    added.add(storage)
                    break
    return added
