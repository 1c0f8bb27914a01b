"""The recorder: everything a traced step allocates, frees and computes, in order.

It is the storage tracker that also measures real probes on the CPU, so predicted and measured mean the same; beside
the peak it keeps every event, whose storage each one was, and what each operator costs. And it answers what fake
tensors cannot: numbers that the code reads from small tensors whose values are known, such as labels and masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes as on_real_tensors
from torch.utils._pytree import tree_iter, tree_map_only

from autofit.core.errors import UntraceableError
from autofit.estimate.costs import Cost, cost_of
from autofit.memory.tracker import StorageTracker

# Values of tensors up to this size are computed beside their fakes: a causal mask of 1024 tokens still is, activations
# never are, since nothing is known of the weights. Of floats, counters and scales are enough.
_KNOWN_ELEMENTS = 2**20
_KNOWN_FLOATS = 16
_READ = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Event:
    """A storage was allocated, changed size or was freed (0 bytes). `storage` numbers lives, not addresses."""

    storage: int
    nbytes: int


class Recorder(StorageTracker):
    """Records the events and the cost of all operators while it is active, under a fake-tensor mode.

    Attributes:
        events: allocations and frees in order.
        marks: (number of events so far, what began there).
        costs: what the operators cost, by (what was going on, kind of operator, dtype).
        labels: what each storage is: "parameters", "gradients", "optimizer", "inputs"; others are told by their lives.
        inside: (operator, arguments, results) -> the most bytes that live inside the call beside its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.marks: list[tuple[int, str]] = [(0, "build")]
        self.costs: dict[tuple[str, str, str], Cost] = {}
        self.labels: dict[int, str] = {}
        self.phase: Callable[[], str] | None = None
        self.inside: Callable[[Any, tuple[Any, ...], Any], int] | None = None
        self._numbers: dict[int, int] = {}
        self._lives = 0

    def mark(self, name: str) -> None:
        """What comes from here on is `name`."""
        self.marks.append((len(self.events), name))

    def label(self, value: Any, name: str) -> None:
        """Say what the storages of a tensor, or of the tensors of a container, are."""
        self._see(value)
        for tensor in tree_iter(value):
            if isinstance(tensor, torch.Tensor):
                for number in self._storages_of(tensor):
                    self.labels[number] = name

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Remember the values of a tensor that code may look at; returns the fake."""
        if _is_followed(real):
            fake.known_values = real  # type: ignore[attr-defined]
        return fake

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # seven of ten calls; the fake mode would take them through all of its own questions
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if func is _READ:
            return self._read(args[0])
        if self.phase is not None and (phase := self.phase()) != self.marks[-1][1]:
            self.mark(phase)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._see(result)
        if self.inside is not None:
            self._pass(self.inside(func, args, result))
        self._follow(func, args, kwargs, result)
        cost = cost_of(func, args, kwargs, result)
        if cost is not None:
            key = (self.marks[-1][1], cost.kind, cost.dtype)
            self.costs[key] = self.costs[key] + cost if key in self.costs else cost
        return result

    def _read(self, tensor: torch.Tensor) -> Any:
        """A number that the code asks for."""
        known = getattr(tensor, "known_values", None)
        if known is not None:
            with on_real_tensors():
                return known.item()
        if not isinstance(tensor, FakeTensor):
            return tensor.item()
        if self.marks[-1][1] == "forward" and not self.answers:
            raise UntraceableError("reads a number out of a tensor that depends on weights (aten._local_scalar_dense)")
        return True if tensor.dtype is torch.bool else 0.0 if tensor.is_floating_point() else 1

    answers = True

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of small tensors that depend on nothing unknown, beside their fakes."""
        inputs = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        results = [each for each in tree_iter(result) if isinstance(each, torch.Tensor)]
        unknown = any(isinstance(each, FakeTensor) and not hasattr(each, "known_values") for each in inputs)
        if unknown or not all(map(_is_followed, results)) or torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.is_mutable:
                _forget(inputs)
            return
        real = functools.partial(tree_map_only, torch.Tensor, lambda tensor: getattr(tensor, "known_values", tensor))
        with on_real_tensors():
            values = func(*real(args), **real(kwargs))
        for fake, value in zip(results, (each for each in tree_iter(values)), strict=False):
            fake.known_values = value

    @contextmanager
    def watching_random_states(self) -> Iterator[None]:
        """Inside, count the states of the generator that are asked for: checkpointing keeps one for every block."""
        plain = torch.get_rng_state

        def counted() -> torch.Tensor:
            state = plain()
            self._see(state)
            return state

        with mock.patch.object(torch, "get_rng_state", counted):
            yield

    def _pass(self, nbytes: int) -> None:
        """A storage that lived during a call, for all that did beside the results."""
        if nbytes:
            self._lives += 1
            self.events += [Event(self._lives, nbytes), Event(self._lives, 0)]
            self.peak = max(self.peak, self.live + nbytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        before = self._sizes.get(key)
        super()._count(storage)
        if before is None:
            self._lives += 1
            self._numbers[key] = self._lives
        if self._sizes[key] != before:
            self.events.append(Event(self._numbers[key], self._sizes[key]))

    def _freed(self, key: int, reference: Any) -> None:
        super()._freed(key, reference)
        number = self._numbers.pop(key, None)
        if number is not None:
            self.events.append(Event(number, 0))

    def _storages_of(self, tensor: torch.Tensor) -> Iterable[int]:
        from autofit.setup.copies import plain_tensors

        for plain in plain_tensors(tensor):
            number = self._numbers.get(plain.untyped_storage()._cdata)
            if number is not None:
                yield number


def _is_followed(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_KNOWN_FLOATS if tensor.is_floating_point() else _KNOWN_ELEMENTS)


def _forget(tensors: list[torch.Tensor]) -> None:
    """What was known of tensors that may have been written to with something unknown."""
    for tensor in tensors:
        if hasattr(tensor, "known_values"):
            del tensor.known_values
