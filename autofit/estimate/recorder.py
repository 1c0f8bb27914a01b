"""The recorder: everything a traced step allocates, frees and computes, in order.

It extends the storage tracker that measures probes on the CPU, so predicted and measured bytes mean
the same, by every event, its storage and the cost of each operator. It also answers what fake
tensors cannot: numbers that the code reads from small tensors of known values, such as labels and
masks.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._pytree import tree_iter, tree_map_only

from autofit.core.errors import UntraceableError
from autofit.core.estimate import OF_SEVERAL
from autofit.core.hardware import Hardware
from autofit.estimate.known_values import (
    CHOICES,
    computed,
    follow,
    is_assumed,
    on_real_tensors,
    spread_evenly,
    value_of,
)
from autofit.estimate.library_kernels import library_kernels
from autofit.estimate.operator_costs import MATMUL, Cost, cost_of, tensors_in
from autofit.hardware.tracker import StorageTracker, wraps_tensors
from autofit.setup.host_copies import plain_tensors

# References to a gradient that only the engine holds, and to its storage, inside a dispatch.
_CPP_REFERENCES = 4
_PYTHON_REFERENCES = 3
_HOLDERS = 2

# Where nobody's model is.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

_READ = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default
_ADD = torch.ops.aten.add.Tensor
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
_DEVICE = torch.ops.prim.device.default
_COPIES = ("aten::copy_", "fsdp::all_gather_copy_in")
_SHAPED_BY_LENGTHS = ("aten::_ctc_loss",)  # whatever the numbers
_MASKED = ("aten::index", "aten::masked_select")
_MASKS = (torch.bool, torch.uint8)

# What is taken for granted, in words for reports.
_SPREAD = (
    "what the model's own scores choose, as the experts of a token, was taken to be spread evenly."
)
_ALL = "where values choose rows, all were taken to be chosen, the most there can be."

HOST = "host"
OUTER = -1  # in place of a block: what belongs to none


class Event(NamedTuple):
    """A storage is allocated, resized or freed.

    Attributes:
        storage: numbers lives, not addresses.
        nbytes: that it has from now on; 0: it is freed.
    """

    storage: int
    nbytes: int


@dataclass(frozen=True)
class Mark:
    """The start of a phase, or of one block's work in it.

    Attributes:
        events, costs: how many come earlier.
        dispatched: how many operators do, including those without a cost.
        phase: "build", "state", "forward", "backward", "update" or "end".
        block: the number of the block, or CHUNK or FROZEN of shallow_model; None: what belongs to
            none.
    """

    events: int
    costs: int
    dispatched: int
    phase: str
    block: int | None = None


@dataclass(frozen=True)
class Collective:
    """An exchange of a group of ranks.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast.
        nbytes: those of the whole: what is gathered, or before it is reduced.
        ranks: of the group.
        waits: what follows waits for it; else it runs beside.
        stride: from one rank of the group to the next: 1 for neighbours, which are on one node.
        event: the number of earlier events.
        parts: the bytes of each weight, where several are gathered at once.
    """

    kind: str
    nbytes: int
    ranks: int
    waits: bool
    stride: int
    event: int = 0
    parts: tuple[int, ...] = ()


class Recorder(StorageTracker):
    """Records the events and costs of all operators while it is active, under a fake-tensor mode.

    Attributes:
        events: allocations and frees in order.
        marks: where phases, and blocks in them, begin.
        costs: what the operators cost, in order.
        labels: what a storage is: "parameters", "gradients", "optimizer", "inputs"; "host": not on
            the device. Others follow from their lifetimes.
        living: the storages that are not freed yet.
        owners: the number of the model's block that a labelled storage belongs to.
        kin: the block that a storage belongs to, or that all it was computed from does, where no
            mark tells; OUTER where that is none, or several.
        streams: the CUDA stream that a storage is made in, where it is not the usual one.
        joined: the bytes of each weight in a storage that holds several.
        completed: by gradient, the number of events before it was complete.
        products: by phase, the number of events before its first matrix product ended.
        before_each: called before each operator.
        called: called with each operator that costs something, its arguments and its cost.
        exchanged, collectives: tells what an operator exchanges with other ranks; what was
            exchanged.
        ignoring: what runs now is not part of the step.
        alike: the samples whose rows choose alike, among experts for example.
        assumptions: what was taken for granted of values, in sentences.
    """

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self._kernels = library_kernels(hardware)
        # Count as the tracker of a CPU probe does: of a library's kernel it sees the results alone,
        # and autograd's engine never adds gradients in place under a dispatch mode.
        self._as_tracked = hardware.device == "cpu"

        self._paused = False

        self.events: list[Event] = []
        self.marks: list[Mark] = [Mark(0, 0, 0, "build")]
        self.costs: list[Cost] = []

        self.labels: dict[int, str] = {}
        self.owners: dict[int, int] = {}
        self.kin: dict[int, int] = {}
        self.streams: dict[int, str] = {}
        self.joined: dict[int, tuple[int, ...]] = {}

        self.completed: dict[int, int] = {}
        self.products: dict[str, int] = {}

        self.phase: Callable[[], str] | None = None
        self.before_each: Callable[[], None] | None = None
        self.called: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Cost], None] | None = None
        self.exchanged: Callable[[Any, tuple[Any, ...], Any], Collective | None] = (
            lambda func, args, result: None
        )

        self.collectives: list[Collective] = []
        self.alike = 1
        self.ignoring = False
        self.assumptions: dict[str, None] = {}

        self._dispatched = 0
        self._numbers: dict[int, int] = {}

        self.living: set[int] = set()
        self._lives = 0
        self._has_host = False

    def mark(self, phase: str, block: int | None = None) -> None:
        """Begin a phase, or a block of the model in it."""
        self.marks.append(Mark(len(self.events), len(self.costs), self._dispatched, phase, block))

    def label(self, value: Any, name: str, block: int | None = None) -> None:
        """Label the storages of a tensor or container, and say which block of the model they belong
        to."""
        self.see(value)
        for number in self.storages_of(value):
            if block is not None:
                self.kin[number] = block
            # Others are of the block that they are made in.
            elif name != HOST and name not in OF_SEVERAL:
                self.kin.setdefault(number, OUTER)

            # The state of an offloaded optimizer stays on the host.
            if self.labels.get(number) == HOST:
                continue

            self.labels[number] = name
            if name == "gradients":
                self.completed[number] = len(self.events)
            if block is not None:
                self.owners[number] = block

    @contextmanager
    def apart(self) -> Iterator[list[Event]]:
        """Record what happens inside as no part of the step; yields the list of its events."""
        kept = ("events", "costs", "collectives", "products", "called")
        step = {name: getattr(self, name) for name in kept}
        before = self._lives
        self.events = []
        self.costs = []
        self.collectives = []
        self.products = {}
        self.called = None
        try:
            yield self.events
        finally:
            vars(self).update(step)
            # What lives on is nothing that the step knows; its numbers are given again.
            for key, number in list(self._numbers.items()):
                if number > before:
                    del self._numbers[key]

            for number in list(self.labels):
                if number > before:
                    del self.labels[number]

    def resize(self, sizes: Mapping[int, int]) -> None:
        """Count these storages as if they had held so many bytes, as long as they were there."""
        events = []
        for event in self.events:
            if event.nbytes and event.storage in sizes:
                event = event._replace(nbytes=sizes[event.storage])

            events.append(event)

        self.events = events

    def storages_of(self, value: Any) -> Iterator[int]:
        """The numbers of the storages of a tensor or container."""
        for tensor in tree_iter(value):
            for plain in plain_tensors(tensor) if isinstance(tensor, torch.Tensor) else ():
                number = self._numbers.get(plain.untyped_storage()._cdata)
                if number is not None:
                    yield number

    def note_host(self, tensor: Any) -> None:
        """Mark a tensor, or those of a list, as being in the host's memory, and with it what is
        computed from such tensors alone."""
        self.label(tensor, HOST)
        self._has_host = True

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the host's memory."""
        return HOST in map(self.labels.get, self.storages_of(tensor))

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a tensor that is on the host, which fake tensors do not tell
        apart."""
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host."""
        copy = torch.empty_like(tensor)
        self.note_host(copy)
        return copy.copy_(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to keep a compiler out at every operator, as of QuickFakes."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        # Seven of ten calls; the fake mode would run all of its own checks on them.
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if func is _READ:
            return self._read(args[0])
        if self.ignoring:
            return func(*args, **(kwargs or {}))
        if any(map(wraps_tensors, types)):
            return NotImplemented  # it dispatches again, with its inner tensors
        if func is _WAIT:  # the argument itself, as in a run; a fake one would be another tensor
            return args[0]

        if self.phase is not None and (phase := self.phase()) != self.marks[-1].phase:
            self.mark(phase)

        self._dispatched += 1
        # Tensors that a model holds beside its parameters and buffers.
        if self._as_tracked and func is not _LIFT:
            self.see([tensor for tensor in tensors_in(args) if not isinstance(tensor, FakeTensor)])
        if self.before_each is not None:
            self.before_each()

        kwargs = kwargs or {}
        name = _name(func)
        kernel = self._kernels.get(name)

        if kernel is not None:
            self._paused = self._as_tracked
            with self:
                result = kernel(*args, **kwargs)

            self._paused = False
            self.see(result)
            if func.namespace != "aten":  # made of operators that were booked
                return result
        else:
            if func is _ADD and not self._as_tracked and _sums_gradients(args):
                func = torch.ops.aten.add_.Tensor

            try:
                result = func(*args, **kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException):
                result = self._by_values(func, args, kwargs)

            self.see(result)

        if (collective := self.exchanged(func, (*args, *kwargs.values()), result)) is not None:
            self.collectives.append(replace(collective, event=len(self.events)))
            if func is _REDUCE_SCATTER and self._as_tracked:  # gloo works on a copy
                self._lives += 1
                self.events += [Event(self._lives, collective.nbytes), Event(self._lives, 0)]

        given = tensors_in(args, kwargs)
        if self.marks[-1].block is None:
            self._note_kin(args, given, result)

        follow(func, args, kwargs, given, result)
        if name in CHOICES:
            spread_evenly(func, args, kwargs, result, self.alike)

        cost = cost_of(func, args, kwargs, given, result)
        if self._has_host:
            cost = self._with_host(func, (args, kwargs), result, cost)

        if cost is not None:
            self.costs.append(cost)
            if cost.kind == MATMUL:
                self.products.setdefault(self.marks[-1].phase, len(self.events))
            if self.called is not None:
                self.called(func, args, kwargs, cost)

        return result

    def _note_kin(self, args: Any, given: Sequence[torch.Tensor], result: Any) -> None:
        """Note the blocks of what an operator made: of each of a list the block of its own
        argument."""
        if isinstance(result, torch.Tensor):
            self._inherit(given, result)
        elif isinstance(result, list | tuple):
            alike = [
                items for items in args if isinstance(items, list) and len(items) == len(result)
            ]
            sources = alike[0] if alike else [given] * len(result)
            for source, made in zip(sources, result, strict=True):
                self._inherit(tensors_in(source), made)

    def _inherit(self, given: Sequence[torch.Tensor], made: Any) -> None:
        """Note the block of what was computed from some tensors."""
        number = self._number_of(made) if isinstance(made, torch.Tensor) else None
        if number is None or number in self.kin:
            return

        blocks = {self.kin.get(self._number_of(tensor) or 0) for tensor in given} - {None}
        inner = blocks - {OUTER}
        if blocks:
            self.kin[number] = inner.pop() if len(inner) == 1 else OUTER  # type: ignore[assignment]

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a plain tensor's storage."""
        if wraps_tensors(type(tensor)) or tensor.layout is not torch.strided:
            return None
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def _read(self, tensor: torch.Tensor) -> Any:
        if (known := value_of(tensor)) is not None:
            self._note_assumed(tensor)
            with on_real_tensors():
                return known.item()

        if self.phase is not None and self.phase() == "forward":
            where = "PyTorch"
            for frame in traceback.extract_stack():
                if not frame.filename.startswith(_LIBRARIES):
                    where = f"{frame.filename}:{frame.lineno}"

            raise UntraceableError(
                f"the model's forward reads a number that depends on its weights (at {where})."
            )

        # The loop, the optimizer or a loss scaler reads: the loss is finite, and no gradient
        # overflows.
        if tensor.dtype is torch.bool:
            return True

        return 0.0 if tensor.is_floating_point() else 1

    def _by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape follows from values; raises again where they are
        unknown."""
        if _name(func) in _MASKED:
            self._paused = self._as_tracked  # the indices of a mask are a kernel's temporaries
            with self:
                args = _with_indices(*args)
                func = torch.ops.aten.index.Tensor

            self._paused = False
            return func(*args)

        if _name(func) in _SHAPED_BY_LENGTHS:
            args = tree_map_only(
                torch.Tensor,
                lambda tensor: tensor if value_of(tensor) is not None else _zeros(tensor),
                args,
            )

        made = computed(func, args, kwargs)
        self._note_assumed((args, kwargs))
        if made is None and _name(func) == "aten::nonzero":
            self.assumptions[_ALL] = None
            (mask,) = args

            return mask.new_empty_strided(
                (mask.numel(), mask.dim()),
                (1, mask.numel()),
                dtype=torch.int64,
            )

        if made is None and _name(func) == "aten::equal":  # only with itself
            one, other = (
                (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
                for tensor in args
            )
            return one == other

        if made is None:
            return func(*args, **kwargs)
        return tree_map_only(torch.Tensor, _fake_like, made)

    def _note_assumed(self, read: Any) -> None:
        if is_assumed(read):
            self.assumptions[_SPREAD] = None

    def _with_host(
        self,
        func: Any,
        given: Any,
        result: Any,
        cost: Cost | None,
    ) -> Cost | None:
        """The cost, where what the host computes is not the device's work, and a copy between them
        is a transfer."""
        on_host = []
        on_device = []
        for tensor in tensors_in(given):
            if not tensor.dim():  # numbers may come from anywhere
                continue
            if self.is_on_host(tensor):
                on_host.append(tensor)
            else:
                on_device.append(tensor)

        if not on_host:
            return cost

        if not on_device:
            self.label(result, HOST)
            return replace(cost, kind=HOST) if cost else None

        if _name(func) in _COPIES:
            dtype = str(on_host[0].dtype).removeprefix("torch.")
            return Cost("transfer", dtype, 0, tuple(tensor.nbytes for tensor in on_host))

        if cost:  # a gradient is moved and then added to one of the host
            moved = [tensor.nbytes for tensor in on_device]
            return replace(cost, kind=HOST, sizes=(*cost.sizes, *moved))

        return cost

    def _count(self, storage: torch.UntypedStorage) -> None:
        if self._paused:
            return

        key = storage._cdata
        before = self._sizes.get(key)
        super()._count(storage)
        if before is None:
            self._lives += 1
            self._numbers[key] = self._lives
            self.living.add(self._lives)

        if self._sizes[key] != before:
            self.events.append(Event(self._numbers[key], self._sizes[key]))

    def _freed(self, key: int, reference: Any) -> None:
        super()._freed(key, reference)
        number = self._numbers.pop(key, None)
        if number is not None:
            self.living.discard(number)
            self.events.append(Event(number, 0))


def _sums_gradients(args: tuple[Any, ...]) -> bool:
    """Whether autograd's engine adds a second gradient to the first argument, which nobody else
    holds."""
    # On plain tensors the engine then adds in place (input_buffer.cpp, can_accumulate_inplace), but
    # never on fake ones: a tied embedding would have its gradient twice. The references counted are
    # this call's and the engine's one. The tensor gets no name of its own: after models were
    # compiled in the process, an argument had one reference more (dynamo's way of evaluating frames
    # does not hand references on).
    if (
        torch.is_grad_enabled()
        or torch._C._current_autograd_node() is None
        or not isinstance(args[0], FakeTensor)
    ):
        return False

    alone = (
        args[0]._use_count() <= _CPP_REFERENCES  # type: ignore[attr-defined]
        and sys.getrefcount(args[0]) <= _PYTHON_REFERENCES
        and torch._C._storage_Use_Count(args[0].untyped_storage()._cdata) <= _HOLDERS
    )

    return alone and torch.ops.aten.is_non_overlapping_and_dense.default(args[0])


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    with on_real_tensors():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _fake_like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)


def _with_indices(
    values: torch.Tensor, masks: Any
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The arguments of an indexing whose masks are the indices of what they choose."""
    if isinstance(masks, torch.Tensor):  # of masked_select, which broadcasts
        shape = torch.broadcast_shapes(values.shape, masks.shape)
        values = values.expand(shape)
        masks = [masks.expand(shape)]

    indices: list[torch.Tensor | None] = []
    for mask in masks:
        if mask is not None and mask.dtype in _MASKS:
            indices += mask.nonzero().unbind(1)
        else:
            indices.append(mask)

    return values, indices


def _name(func: Any) -> str:
    return str(func._schema.name)
