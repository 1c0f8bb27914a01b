"""The allocator's view of a run: two whole steps, put together from a trace of one micro-batch and
one update.

What must be reserved depends on long-lived blocks between short-lived ones: cuBLAS takes its
workspaces at the first products, the gradients of a step's first micro-batch stay where they were
made while those of the second are added, and the optimizer makes its state in the first update, in
whatever the backward has left free.
"""

import itertools
from collections.abc import Iterable, Iterator, Set

from autofit.core.hardware import Hardware
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.peak import rounded
from autofit.estimate.step_trace import Trace
from autofit.hardware.caching_allocator import reserved_by

_Events = list[tuple[int, int]]  # (storage, bytes; 0: it is freed)
_STEPS = 2
# Events around the moment when a gradient is complete, among which the added one is freed.
_NEAR = 4


def reserved_for(traced: Trace, hardware: Hardware, *, expandable: bool) -> int:
    """Bytes that the target's allocator reserves for two steps."""
    run = TwoSteps(traced.whole or traced, hardware)
    return reserved_by(
        run.events(),
        expandable=expandable,
        streams=run.streams,
    )


class TwoSteps:
    """The parts of a trace that a run consists of, and what to know of their storages.

    Attributes:
        streams: those of storages that are not made in the usual one, filled as `events` goes on.
    """

    def __init__(self, traced: Trace, hardware: Hardware) -> None:
        events = list(rounded(traced, hardware))
        built, begun, updated = (traced.start(phase) for phase in ("state", "forward", "update"))
        before = {
            name: [event for event in events[built:begun] if traced.labels.get(event[0]) == name]
            for name in ("inputs", "optimizer", "gradients")
        }

        # Those that rest on the host come and go in each step as what else a step makes.
        rest = {storage for storage, nbytes in dict(before["gradients"]).items() if not nbytes}
        before["gradients"] = [event for event in before["gradients"] if event[0] not in rest]
        gradients = {storage for storage, _ in before["gradients"]}

        # The storages with a single life: weights, inputs and optimizer state.
        self.lasting = {
            storage for storage, _ in (*events[:built], *before["inputs"], *before["optimizer"])
        }

        # Gradients that are added to earlier ones and freed; none where nothing is accumulated.
        self.added = _added(
            events,
            traced,
            gradients,
            self.lasting,
        )
        if gradients and not self.added:  # the trace shows no addition: they exist from the start
            before["inputs"] += before["gradients"]
            self.lasting |= gradients

        self.build = events[:built]
        self.inputs = before["inputs"]
        self.state = before["optimizer"]

        self.step = events[begun:updated]
        self.update = events[updated:]

        # What the first products take and never free: (events of the step before it, bytes).
        workspace = workspace_bytes(hardware) // 2
        products = sorted(
            traced.products[phase] for phase in ("forward", "backward") if phase in traced.products
        )
        self.workspaces = [(max(0, event - begun), workspace) for event in products if workspace]

        self.streams = dict(traced.streams)
        self.numbers = itertools.count(1 + max((storage for storage, _ in events), default=0))

    def events(self) -> Iterator[tuple[int, int]]:
        """The allocations and frees, from building the model on: (storage, bytes), 0 for a free."""
        yield from self.build
        yield from self.inputs
        for step in range(_STEPS):
            gradients: list[int] = []
            alive: dict[int, int] = {}
            first = self.step if step else self._with_workspaces()
            yield from self._renumbered(
                first,
                alive,
                retained=gradients if self.added else None,
            )

            if self.added:
                yield from _freed(alive)
                yield from self._renumbered(self.step, alive)
                yield from _freed(alive)

            yield from self._renumbered(
                self.update if step else self.state,
                alive,
            )
            yield from _freed(alive)
            yield from ((number, 0) for number in gradients)

    def _with_workspaces(self) -> Iterator[tuple[int, int]]:
        done = 0
        for event, nbytes in self.workspaces:
            yield from self.step[done:event]
            yield -next(self.numbers), nbytes  # a number of its own, and below 0: it is never freed
            done = event

        yield from self.step[done:]

    def _renumbered(
        self,
        events: Iterable[tuple[int, int]],
        alive: dict[int, int],
        *,
        retained: list[int] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """With new numbers, those `alive`, for what does not last; what would be added to nothing
        yet is `retained`."""
        for storage, nbytes in events:
            if nbytes and storage >= 0 and storage not in self.lasting and storage not in alive:
                alive[storage] = next(self.numbers)
                if storage in self.streams:
                    self.streams[alive[storage]] = self.streams[storage]

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


def _added(
    events: _Events,
    traced: Trace,
    gradients: Set[int],
    lasting: Set[int],
) -> set[int]:
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
