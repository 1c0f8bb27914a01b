"""A run as its allocator sees it. A trace holds one micro-batch and one update; what must be reserved depends on more:

lasting blocks come to lie between passing ones. cuBLAS takes its workspaces at the first products, the gradients of a
step's first micro-batch stay where they were made while the second one's are added to them, and the optimizer makes its
state in the first update, in whatever the backward has left free. So two whole steps are put together from the trace.
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


def run_of(traced: Trace, hardware: Hardware) -> Iterator[tuple[int, int]]:
    """The allocations and frees of two steps from the making of the model on: (storage, bytes), 0 for a free."""
    return _Run.of(traced, hardware).events()


@dataclass(frozen=True)
class _Run:
    """The parts of a trace that a run is put together from.

    Attributes:
        lasting: the storages that have one life: of weights, inputs and optimizer state.
        added: those of gradients that are added to earlier ones' and freed; empty where nothing is accumulated.
        workspaces: (events of the step before it, bytes) of what the first products take and keep.
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
        made, begun = starts["state"], starts["forward"]
        updated = starts.get("update", len(events))
        before = {
            name: [each for each in events[made:begun] if traced.labels.get(each[0]) == name]
            for name in ("inputs", "optimizer", "gradients")
        }
        gradients = {storage for storage, _ in before["gradients"]}
        lasting = {storage for storage, _ in (*events[:made], *before["inputs"], *before["optimizer"])}
        added = set(_added(events, traced, gradients, lasting))
        if gradients and not added:  # nobody saw them be added: they are there from the start
            before["inputs"] += before["gradients"]
            lasting |= gradients
        each = workspace_bytes(hardware) // 2
        places = sorted(traced.products[phase] for phase in ("forward", "backward") if phase in traced.products)
        return cls(
            build=events[:made],
            inputs=before["inputs"],
            state=before["optimizer"],
            step=events[begun:updated],
            update=events[updated:],
            lasting=lasting,
            added=added,
            workspaces=tuple((max(0, place - begun), each) for place in places if each),
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
            if self.added:
                yield from self._passed(self._with_workspaces(step, numbers), numbers, alive, stays=gradients)
                yield from _freed(alive)
                yield from self._passed(self.step, numbers, alive)
                yield from _freed(alive)
            else:
                yield from self._passed(self._with_workspaces(step, numbers), numbers, alive)
            yield from self._passed(self.update if step else self.state, numbers, alive)
            yield from _freed(alive)
            yield from ((number, 0) for number in gradients)

    def _with_workspaces(self, step: int, numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
        done = 0
        for place, nbytes in self.workspaces if step == 0 else ():
            yield from self.step[done:place]
            yield -next(numbers), nbytes  # a number of its own, and below 0: it is never freed
            done = place
        yield from self.step[done:]

    def _passed(
        self,
        events: Iterable[tuple[int, int]],
        numbers: Iterator[int],
        alive: dict[int, int],
        *,
        stays: list[int] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Events again, what passes by new numbers; `alive` says which. What would be added stays, where there is
        nothing to add it to yet."""
        for storage, nbytes in events:
            if nbytes and storage >= 0 and storage not in self.lasting and storage not in alive:
                alive[storage] = next(numbers)
            if stays is not None and nbytes == 0 and storage in self.added and storage in alive:
                stays.append(alive.pop(storage))
                continue
            yield alive.get(storage, storage), nbytes
            if nbytes == 0:
                alive.pop(storage, None)


def _freed(alive: dict[int, int]) -> Iterator[tuple[int, int]]:
    for number in alive.values():
        yield number, 0
    alive.clear()


def _added(events: _Events, traced: Trace, gradients: Set[int], lasting: Set[int]) -> Iterator[int]:
    """The storages that are freed when they were added to these gradients."""
    sizes = {storage: nbytes for storage, nbytes in events if nbytes}
    found: set[int] = set()
    for gradient, moment in traced.completed.items():
        if gradient not in gradients:
            continue
        for storage, nbytes in events[max(0, moment - _NEAR) : moment + _NEAR]:
            alike = sizes.get(storage) == sizes.get(gradient)
            if nbytes == 0 and alike and storage not in lasting | gradients | found:
                found.add(storage)
                yield storage
                break
