"""Weights that rest in host memory and are streamed to the device block by block, forward and backward.

Each streamed weight keeps its storage on the device, which is emptied while its block rests and filled before the block
runs. Views of it, and what autograd has saved of it, stay valid: they share the storage. It is filled through a tensor
with a version counter of its own, so that autograd does not see the weight change.

A block is *needed* when one of its modules is called or a gradient reaches one of its outputs; every block but that one
and its expected successor then leaves the device. Autograd runs strictly backwards in the order of the forward, so a
gradient that reaches a block means that the blocks after it are done. Whatever a model does with its blocks (calls them
twice, skips some, fails in one), a block's weights are there when it runs; a wrong guess only costs the time of a copy.

Trained weights are streamed, too. Where the backward itself updates them, a block that was needed in a backward goes
back to the host when it leaves, beside the next block's backward, and its memory is let go after that one. Where the
host updates them, its gradients do so instead, and come again with its weights when a later backward adds to them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.config import Config
from autofit.core.hardware import MIB
from autofit.setup.host_copies import CopyLane, Ticket
from autofit.setup.resting_weights import Block, RestingGradient, RestingWeight, Slot

# where trained weights are updated: in the backward, or on the host after it
Updated = Literal["device", "host"]

# Norms and biases are thousands of times smaller than the matrices beside them: moving them frees nothing.
SMALLEST = MIB // 16
# The running block and the next one are on the device: without a third none could rest.
LEAST_BLOCKS = 3


def is_whole(config: Config) -> bool:
    """Whether a config trains all weights, not adapters or a head."""
    return not (config.lora_rank or config.head_only)


def updated_on(config: Config) -> Updated | None:
    """Where a config updates the weights that parameter_offload streams; None where those are frozen."""
    if not is_whole(config):
        return None
    return "device" if config.optimizer_in_backward else "host"


def streamable_weights(model: nn.Module, config: Config) -> list[torch.Tensor]:
    """The values of the weights that are large enough to be streamed, also of those outside blocks; of quantised ones
    without their constants."""
    weights = (each for each in model.parameters() if is_whole(config) or not each.requires_grad)
    return [each.detach() for each in weights if each.untyped_storage().nbytes() >= SMALLEST]


class BlockStreamer:
    """Streams the frozen weights of blocks, or all that they have where these are `updated`; made while the model may
    still have no weights. `hold` takes each weight as it is created; weights it was never given are taken when the
    model first runs. `whole` says that blocks are only called as a whole, and puts no hooks on their parts, which would
    break the graphs of compiled blocks (20 graphs instead of 2 for a Llama of five blocks)."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        lane: CopyLane,
        *,
        smallest: int = SMALLEST,
        whole: bool = False,
        updated: Updated | None = None,
    ) -> None:
        self._lane = lane
        self._smallest = smallest
        self._updated = updated
        own = zip(blocks, _own_slots(model, blocks, updated is not None), strict=True)
        self.blocks = [Block(block, slots) for block, slots in own if slots]
        self._complete = False
        self._stored: Ticket = None  # of the last copy to the host
        self._running: tuple[str, Block] | None = None  # the pass, and the block needed last
        self._followers: dict[tuple[str, int], Block] = {}
        self._handles = [handle for block in self.blocks for handle in self._hooks(block, whole)]

    def slots(self) -> Iterator[tuple[Block, Slot]]:
        """Every weight that may be streamed, with its block."""
        return ((block, slot) for block in self.blocks for slot in block.slots)

    def hold(self, block: Block, slot: Slot, weight: nn.Parameter) -> None:
        """Move a weight to the host, if it is large enough and owns its storage, which is empty from then on."""
        storage = weight.untyped_storage()
        owns = (
            not is_traceable_wrapper_subclass(weight)
            and storage.nbytes() == weight.numel() * weight.itemsize
        )
        if owns and storage.nbytes() >= self._smallest and slot not in block.resting:
            block.resting[slot] = RestingWeight(weight, self._lane)
            block.on_device = False
            # before it is updated or added to, in whatever order gradients come
            if weight.requires_grad:
                self._handles.append(weight.register_hook(lambda _: self._need(block)))
                if self._updated == "host":
                    gradient = block.gradients[slot] = RestingGradient(weight, self._lane)
                    made = functools.partial(self._made, block, gradient)
                    self._handles.append(weight.register_post_accumulate_grad_hook(made))

    def value_of(self, weight: nn.Parameter) -> torch.Tensor:
        """What a weight holds, on the host if it rests there; what is written to it is what is streamed from then
        on."""
        for block in self.blocks:
            for resting in block.resting.values():
                if resting.weight is weight:
                    self._rest()
                    return resting.host_view()
        return weight.detach()

    def host_params(self) -> dict[nn.Parameter, torch.Tensor]:
        """Send all to the host; returns each weight that is updated there, with the tensor that holds it and, as
        `grad`, its gradient."""
        self._rest()
        found: dict[nn.Parameter, torch.Tensor] = {}
        for block in self.blocks:
            for slot, gradient in block.gradients.items():
                resting = block.resting[slot]
                resting.own.grad = gradient.host_view()
                found[resting.weight] = resting.own
        return found

    def _rest(self) -> None:
        """Send all blocks to the host."""
        for block in self.blocks:
            # which may not have come from a backward
            block.gradients_on_device = bool(block.gradients)
        self._settle()
        for block in self.blocks:
            block.on_device = True  # an operator on an empty fake weight may have filled it
            self._empty(block)
            self._empty_gradients(block)
        self._running = None

    def close(self) -> None:
        """Remove the hooks and restore every weight; to the host, where the device has no room for all of them."""
        for handle in self._handles:
            handle.remove()
        self._settle()
        try:
            for block in self.blocks:
                self._bring(block)
                self._bring_gradients(block)
                self._lane.wait(block.ticket)
        except torch.OutOfMemoryError:
            for block in self.blocks:
                self._empty(block)
                self._empty_gradients(block)
                for slot, resting in block.resting.items():
                    gradient = (
                        block.gradients[slot].host_view()
                        if slot in block.gradients
                        else resting.weight.grad
                    )
                    resting.weight.grad = None
                    resting.weight.data = resting.host_view()
                    resting.weight.grad = gradient
        for block in self.blocks:
            block.resting.clear()
            block.gradients.clear()

    def _hooks(self, block: Block, whole: bool) -> Iterator[Any]:
        """Hooks on the block and on every module that holds a weight: parts may be called without the block."""
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
                yield module.register_state_dict_post_hook(
                    functools.partial(self._put_host_weights, block)
                )

    def _need(self, block: Block) -> None:
        """Bring a block's weights to the device, and start on those of its expected successor."""
        forward = "forward" if torch.is_grad_enabled() else "evaluation"
        # Recomputing a checkpointed block is part of the backward.
        now = (forward if torch._C._current_graph_task_id() == -1 else "backward", block)
        if now == self._running:
            return
        if not self._complete:
            self._complete = True
            for owner, (module, name) in self.slots():
                self.hold(owner, (module, name), module._parameters[name])  # type: ignore[arg-type]
        if self._running is not None and self._running[1] is not block:
            self._followers[self._running[0], id(self._running[1])] = block
        self._running = now
        following = self._expected()
        backward = now[0] == "backward"
        for other in self.blocks:
            near = other is block or other is following
            if not near and not self._store(other):
                self._empty(other)
            if not (near and backward) and not self._store_gradients(other):
                self._empty_gradients(other)
        self._bring(block)
        if backward:
            self._bring_gradients(block)
        self._lane.wait(block.ticket)
        block.ticket = None
        block.changes |= self._updated == "device" and backward
        if following is not None:
            self._bring(following)
            if backward:
                self._bring_gradients(following)

    def _expected(self) -> Block | None:
        """The block that followed last time; at first, the next one in the order of the model."""
        assert self._running is not None
        now, block = self._running
        index = self.blocks.index(block)
        if (now, id(block)) in self._followers:
            return self._followers[now, id(block)]
        if now == "backward":
            return self.blocks[index - 1] if index else None
        if index + 1 < len(self.blocks):
            return self.blocks[index + 1]
        # the backward starts here
        return self.blocks[index - 1] if now == "forward" else self.blocks[0]

    def _bring(self, block: Block) -> None:
        if not block.on_device:
            block.on_device = True
            try:
                block.ticket = self._lane.copy(
                    [weight.filled() for weight in block.resting.values()]
                )
            # out of memory half-way: a later run must not take the block for filled
            except BaseException:
                self._empty(block)
                self._running = None  # nor the block it failed at for present
                raise

    def _store(self, block: Block) -> bool:
        """Start to copy what a backward has changed to the host; whether there was anything."""
        if not block.changes:
            return False
        block.changes = False
        block.ticket = self._lane.copy([weight.stored() for weight in block.resting.values()])
        self._stored = block.ticket
        return True

    def _made(self, block: Block, gradient: RestingGradient, _: nn.Parameter) -> None:
        block.gradients_on_device = True
        gradient.made()

    def _bring_gradients(self, block: Block) -> None:
        if pairs := [pair for each in block.gradients.values() if (pair := each.filled())]:
            block.gradients_on_device = True
            block.ticket = self._lane.copy(pairs)

    def _store_gradients(self, block: Block) -> bool:
        """Start to copy the gradients to the host that are newer than what is there; whether there were any."""
        if not block.gradients_on_device:
            return False
        if pairs := [pair for each in block.gradients.values() if (pair := each.stored())]:
            self._stored = block.ticket = self._lane.copy(pairs)
        return bool(pairs)

    def _empty_gradients(self, block: Block) -> None:
        if block.gradients_on_device:
            self._lane.wait(block.ticket)
            block.ticket = None
            block.gradients_on_device = False
            for each in block.gradients.values():
                each.empty()

    def _settle(self) -> None:
        """Have the host hold what every weight and gradient holds."""
        for block in self.blocks:
            self._store(block)
            self._store_gradients(block)
        self._lane.finish(self._stored)  # copies are done in order
        self._stored = None

    def _empty(self, block: Block) -> None:
        if block.on_device:
            self._lane.wait(block.ticket)  # or an unfinished copy would write into freed memory
            block.ticket = None
            block.on_device = False
            for weight in block.resting.values():
                weight.storage.resize_(0)

    def _put_host_weights(
        self, block: Block, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        """Fill a state dict from the host, whether or not the weights are on the device."""
        self._settle()
        resting = {weight.storage._cdata: weight for weight in block.resting.values()}
        for name, parameter in module._parameters.items():
            if parameter is not None and prefix + name in state and _memory(parameter) in resting:
                state[prefix + name] = resting[_memory(parameter)].host_view()


def _own_slots(model: nn.Module, blocks: list[nn.Module], trained: bool) -> list[list[Slot]]:
    """Per block, the slots of weights, frozen or `trained` too, whose memory nothing outside the block shares."""
    inside = {module: number for number, block in enumerate(blocks) for module in block.modules()}
    shared = {
        module
        for number, block in enumerate(blocks)
        for module in block.modules()
        if inside[module] != number
    }
    owners: dict[int, set[int | None]] = {}
    candidates: list[tuple[int, int, Slot]] = []
    for module in model.modules():
        number = None if module in shared else inside.get(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owners.setdefault(_memory(parameter), set()).add(number)
            if number is not None and (trained or not parameter.requires_grad):
                candidates.append((number, _memory(parameter), (module, name)))
    slots: list[list[Slot]] = [[] for _ in blocks]
    taken: set[int] = set()
    for number, memory, slot in candidates:
        if owners[memory] == {number} and memory not in taken:
            taken.add(memory)  # tied inside one block: streamed once
            slots[number].append(slot)
    return slots


def _memory(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share their memory."""
    return (
        id(tensor)
        if is_traceable_wrapper_subclass(tensor)
        else int(tensor.untyped_storage()._cdata)
    )


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    for part in parts:
        yield from _tensors_in(part)
