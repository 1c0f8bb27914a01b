"""Frozen weights that rest on the host and come to the device block by block, forward and backward.

Each streamed weight keeps its storage on the device, which is emptied while its block rests and filled before the block
runs. Views of it, and what autograd has saved of it, stay valid: they share the storage. It is filled through a tensor
with a version counter of its own, so that autograd does not take the weight for changed.

Nobody says when a block is done. A block is *needed* when a module of it is called or a gradient reaches an output of
it; what is neither that block nor the one expected after it leaves then. Autograd runs strictly backwards in the order
of the forward, so a gradient that reaches a block means that the blocks after it are through. Whatever a model does
with its blocks (calls them twice, skips some, fails in one), a block's weights are there when it runs; a wrong
expectation only costs the time of a copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.hardware import MIB
from autofit.setup.host_copies import CopyLane, Layout, Ticket, flat_bytes

Slot = tuple[nn.Module, str]  # where a weight is: the module that holds it, and its name there

# Norms and biases are thousands of times smaller than the matrices beside them: a copy each would free nothing.
SMALLEST = MIB // 16
# The one that runs and the next one are on the device; with no third there is nothing left that could rest.
LEAST_BLOCKS = 3


class BlockStreamer:
    """Streams the frozen weights of blocks; made while the model may still have no weights, closed to take it all back.

    `hold` is called on each weight as it comes into being. What has not been handed to it by then is taken up when
    the model first runs. `whole` says that blocks are called as a whole only, and puts no hooks on their parts, which
    would break the code of compiled blocks into pieces (20 graphs instead of 2 for a Llama of five blocks).
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        lane: CopyLane,
        *,
        smallest: int = SMALLEST,
        whole: bool = False,
    ) -> None:
        self._lane, self._smallest = lane, smallest
        own = zip(blocks, _own_slots(model, blocks), strict=True)
        self.blocks = [_Block(block, slots) for block, slots in own if slots]
        self._complete = False
        self._running: tuple[str, _Block] | None = None  # in which pass, and the block needed last
        self._followers: dict[tuple[str, int], _Block] = {}
        self._handles = [handle for block in self.blocks for handle in self._hooks(block, whole)]

    def slots(self) -> Iterator[tuple[_Block, Slot]]:
        """Every place that holds a weight which may be streamed."""
        for block in self.blocks:
            for slot in block.slots:
                yield block, slot

    def hold(self, block: _Block, slot: Slot, weight: nn.Parameter) -> None:
        """Move a weight to the host, if it is large enough and nobody else's; its storage is empty from then on."""
        storage = weight.untyped_storage()
        alone = not is_traceable_wrapper_subclass(weight) and storage.nbytes() == weight.numel() * weight.itemsize
        if alone and storage.nbytes() >= self._smallest and slot not in block.resting:
            block.resting[slot] = _Resting(weight, self._lane)
            block.there = False

    def resident_bytes(self) -> int:
        """Of the streamed weights, those on the device now."""
        return sum(each.storage.nbytes() for block in self.blocks for each in block.resting.values())

    def streamed_bytes(self) -> int:
        """Of all streamed weights."""
        return sum(each.host.numel() for block in self.blocks for each in block.resting.values())

    def close(self) -> None:
        """Remove the hooks and fill every weight for good.

        Where the device has no room for all of them, they are left on the host, so that no weight is lost.
        """
        for handle in self._handles:
            handle.remove()
        try:
            for block in self.blocks:
                self._bring(block)
                self._lane.wait(block.ticket)
        except torch.OutOfMemoryError:
            for block in self.blocks:
                self._empty(block)
                for each in block.resting.values():
                    each.weight.data = each.host_view()
        for block in self.blocks:
            block.resting.clear()

    def _hooks(self, block: _Block, whole: bool) -> Iterator[Any]:
        """On the block, and on every module that holds a weight: parts of a block may be called without the whole."""
        parts = [] if whole else [module for module, _ in block.slots]

        def before(*_: Any) -> None:
            self._need(block)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(before)

        for module in dict.fromkeys((block.module, *parts)):
            yield module.register_forward_pre_hook(before)
            yield module.register_forward_hook(after)
        for module in block.module.modules():
            if module._parameters:
                yield module.register_state_dict_post_hook(functools.partial(_put_host_weights, block))

    def _need(self, block: _Block) -> None:
        """Have a block's weights on the device for what comes next, start on those of the block expected after it."""
        now = (_current_pass(), block)
        if now == self._running:
            return
        if not self._complete:
            self._complete_holding()
        if self._running is not None and self._running[1] is not block:
            self._followers[self._running[0], id(self._running[1])] = block
        self._running = now
        following = self._expected()
        for other in self.blocks:
            if other is not block and other is not following:
                self._empty(other)
        self._bring(block)
        self._lane.wait(block.ticket)
        block.ticket = None
        if following is not None:
            self._bring(following)

    def _expected(self) -> _Block | None:
        """The block that followed the last time; at first, the next one in the order of the model."""
        assert self._running is not None
        now, block = self._running
        place = self.blocks.index(block)
        if (now, id(block)) in self._followers:
            return self._followers[now, id(block)]
        if now == "backward":
            return self.blocks[place - 1] if place else None
        if place + 1 < len(self.blocks):
            return self.blocks[place + 1]
        return self.blocks[place - 1] if now == "forward" else self.blocks[0]  # the backward turns round here

    def _bring(self, block: _Block) -> None:
        if not block.there:
            block.there = True
            try:
                block.ticket = self._lane.copy([each.filled() for each in block.resting.values()])
            except BaseException:  # out of memory half-way: a later run must not take it for filled
                self._empty(block)
                self._running = None  # or the next step would take the block it failed at for present
                raise

    def _empty(self, block: _Block) -> None:
        if block.there:
            self._lane.wait(block.ticket)  # or a copy nobody waited for would write into memory that is let go
            block.ticket = None
            block.there = False
            for each in block.resting.values():
                each.storage.resize_(0)

    def _complete_holding(self) -> None:
        self._complete = True
        for block, (module, name) in self.slots():
            self.hold(block, (module, name), module._parameters[name])  # type: ignore[arg-type]


class _Block:
    """A block, the places of its frozen weights, and those weights that rest."""

    def __init__(self, module: nn.Module, slots: list[Slot]) -> None:
        self.module, self.slots = module, slots
        self.resting: dict[Slot, _Resting] = {}
        self.there = False
        self.ticket: Ticket = None


class _Resting:
    """One weight: its storage on the device and its bytes on the host."""

    def __init__(self, weight: nn.Parameter, lane: CopyLane) -> None:
        self.weight = weight
        self.storage = weight.untyped_storage()
        self._flat = flat_bytes(weight)
        self.host = lane.host_buffer(self._flat.numel())
        self.host.copy_(self._flat)
        self.storage.resize_(0)

    def filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Take memory for it; returns what is to be copied to where."""
        self.storage.resize_(self.host.numel())
        return self._flat, self.host

    def host_view(self) -> torch.Tensor:
        """The weight, on the host, without a copy."""
        return Layout.of(self.weight).on(self.host)


def _own_slots(model: nn.Module, blocks: list[nn.Module]) -> list[list[Slot]]:
    """Per block, the places of frozen weights whose memory is in no other block and nowhere else."""
    inside = {module: number for number, block in enumerate(blocks) for module in block.modules()}
    shared = {module for number, block in enumerate(blocks) for module in block.modules() if inside[module] != number}
    owners: dict[int, set[int | None]] = {}
    places: list[tuple[int, int, Slot]] = []
    for module in model.modules():
        number = None if module in shared else inside.get(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owners.setdefault(_memory(parameter), set()).add(number)
            if number is not None and not parameter.requires_grad:
                places.append((number, _memory(parameter), (module, name)))
    slots: list[list[Slot]] = [[] for _ in blocks]
    taken: set[int] = set()
    for number, memory, slot in places:
        if owners[memory] == {number} and memory not in taken:
            taken.add(memory)  # tied inside one block: streamed once, for all that hold it
            slots[number].append(slot)
    return slots


def _memory(tensor: torch.Tensor) -> int:
    """What two tensors have in common that share their memory."""
    return id(tensor) if is_traceable_wrapper_subclass(tensor) else int(tensor.untyped_storage()._cdata)


def _current_pass() -> str:
    """A checkpointed block that is computed again is part of the backward."""
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "evaluation"


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _put_host_weights(block: _Block, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A state dict gets the weights from the host, whether or not they are on the device at the moment."""
    resting = {each.storage._cdata: each for each in block.resting.values()}
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in state and _memory(parameter) in resting:
            state[prefix + name] = resting[_memory(parameter)].host_view()
