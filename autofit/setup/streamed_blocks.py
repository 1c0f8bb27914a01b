"""Weights that rest in host memory and are streamed to the device block by block, forward and
backward.

The streamed weights of a block share one storage on the device, which is emptied while the block
rests and filled by one copy before it runs. Views of them, and what autograd has saved of them, stay
valid: they share the storage. It is filled through a tensor with a version counter of its own, so
that autograd does not see the weights change.

A block is *needed* when one of its modules is called or a gradient reaches one of its outputs;
every block but that one and its expected successor then leaves the device. Autograd runs strictly
backwards in the order of the forward, so a gradient that reaches a block means that the blocks
after it are done. Whatever a model does with its blocks (calls them twice, skips some, fails in
one), a block's weights are there when it runs; a wrong guess only costs the time of a copy.

Trained weights are streamed, too. Where the backward itself updates them, a block that was needed
in a backward is copied to the host when it leaves, beside the next block's backward, and its memory
is freed after that one. Where the host updates them, its gradients are copied instead, and come
again with its weights when a later backward adds to them.
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
from autofit.setup.host_copies import CopyLane, HostArena, Ticket, storage_key
from autofit.setup.resting_weights import Block, Pair, RestingGradient, RestingWeight, Slot

# Where trained weights are updated: in the backward, or on the host after it.
Updated = Literal["device", "host"]

# Norms and biases are thousands of times smaller than the matrices beside them: moving them frees
# nothing.
SMALLEST = MIB // 16
# The running block and the next one are on the device: without a third none could rest.
LEAST_BLOCKS = 3


def is_whole(config: Config) -> bool:
    """Whether a config trains all weights, not adapters or a head."""
    return not (config.lora_rank or config.head_only)


def updated_on(config: Config) -> Updated | None:
    """Where a config updates the weights that parameter_offload streams; None where those are
    frozen."""
    if not is_whole(config):
        return None
    if config.optimizer_in_backward:
        return "device"
    return "host"


def streamable_weights(model: nn.Module, config: Config) -> list[torch.Tensor]:
    """The values of the weights that are large enough to be streamed, also of those outside blocks;
    of quantised ones without their constants."""
    found = []
    for weight in model.parameters():
        is_streamed = is_whole(config) or not weight.requires_grad
        if is_streamed and weight.untyped_storage().nbytes() >= SMALLEST:
            found.append(weight.detach())
    return found


class BlockStreamer:
    """Streams the frozen weights of blocks, or all that they have where these are updated.

    Made while the model may still have no weights: `hold` takes each weight as it is created.
    Weights that it was never given are taken when the model first runs.

    Args:
        smallest: bytes from which on a weight is moved.
        whole: blocks are only called as a whole. Their parts get no hooks then, which would break
            the graphs of compiled blocks (20 graphs instead of 2 for a Llama of five blocks).
        updated: where trained weights are updated; None leaves them on the device.
    """

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
        self._arena = HostArena(lane)
        self._smallest = smallest
        self._updated = updated
        slots_of_blocks = _own_slots(model, blocks, updated is not None)

        self.blocks = []
        for module, slots in zip(blocks, slots_of_blocks, strict=True):
            if slots:
                self.blocks.append(Block(module, slots))

        self._complete = False
        self._stored: Ticket = None  # of the last copy to the host
        self._running: tuple[str, Block] | None = None  # the pass, and the block needed last
        self._followers: dict[tuple[str, int], Block] = {}
        self._handles: list[Any] = []
        for block in self.blocks:
            self._handles += self._hooks(block, whole)

    def slots(self) -> Iterator[tuple[Block, Slot]]:
        """Every weight that may be streamed, with its block."""
        for block in self.blocks:
            for slot in block.slots:
                yield block, slot

    def hold(self, block: Block, slot: Slot, weight: nn.Parameter) -> None:
        """Move a weight to the host, if it is large enough and owns its storage, which is empty
        from then on."""
        if is_traceable_wrapper_subclass(weight) or slot in block.resting:
            return
        nbytes = weight.untyped_storage().nbytes()
        if nbytes < self._smallest or nbytes != weight.numel() * weight.itemsize:
            return

        block.resting[slot] = RestingWeight(weight, self._lane)
        block.on_device = False
        if not weight.requires_grad:
            return

        # before it is updated or added to, in whatever order gradients come
        self._handles.append(weight.register_hook(lambda _: self._need(block)))
        if self._updated == "host":
            gradient = RestingGradient(weight, self._lane)
            block.gradients[slot] = gradient
            made = functools.partial(self._made, block, gradient)
            self._handles.append(weight.register_post_accumulate_grad_hook(made))

    def made(self, block: Block, slot: Slot) -> None:
        """Note that a weight is there which its block awaited; after the last one they are put
        together."""
        block.awaited.discard(slot)
        if not block.awaited:
            block.pack(self._arena)

    def value_of(self, weight: nn.Parameter) -> torch.Tensor:
        """The current value of a weight, on the host if it rests there; writes are persistent."""
        for block in self.blocks:
            for resting in block.resting.values():
                if resting.weight is weight:
                    self._rest()
                    return resting.host_view()
        return weight.detach()

    def host_params(self) -> dict[nn.Parameter, torch.Tensor]:
        """Send all to the host; returns each weight that is updated there, with the tensor that
        holds it and, as `grad`, its gradient."""
        self._rest()
        found = {}
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
        """Remove the hooks and restore every weight; to the host, where the device has no room for
        all of them."""
        for handle in self._handles:
            handle.remove()

        self._settle()

        try:
            for block in self.blocks:
                self._bring(block)
                self._bring_gradients(block)
                self._lane.wait(block.ticket)
                for weight in block.resting.values():
                    weight.leave()
        except torch.OutOfMemoryError:
            for block in self.blocks:
                self._restore_on_host(block)

        for block in self.blocks:
            block.resting.clear()
            block.gradients.clear()

    def _restore_on_host(self, block: Block) -> None:
        """Leave a block's weights where they rest, as tensors of the host."""
        self._empty(block)
        self._empty_gradients(block)
        for slot, resting in block.resting.items():
            weight = resting.weight
            gradient = weight.grad
            if slot in block.gradients:
                gradient = block.gradients[slot].host_view()

            weight.grad = None
            weight.data = resting.host_view().clone()
            weight.grad = gradient

    def _hooks(self, block: Block, whole: bool) -> Iterator[Any]:
        """Hooks on the block and on every module that holds a weight: parts may be called without
        the block."""

        def before(*_: Any) -> None:
            self._need(block)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(before)

        called = [block.module]
        if not whole:
            called += [module for module, _ in block.slots]
        for module in dict.fromkeys(called):
            yield module.register_forward_pre_hook(before)
            yield module.register_forward_hook(after)

        put = functools.partial(self._put_host_weights, block)
        for module in block.module.modules():
            if module._parameters:
                yield module.register_state_dict_post_hook(put)

    def _need(self, block: Block) -> None:
        """Bring a block's weights to the device, and start on those of its expected successor."""
        now = "evaluation"
        if torch._C._current_graph_task_id() != -1:
            now = "backward"  # also where a checkpointed block is recomputed
        elif torch.is_grad_enabled():
            now = "forward"
        if (now, block) == self._running:
            return

        if not self._complete:
            self._complete = True
            for owner, (module, name) in self.slots():
                self.hold(owner, (module, name), module._parameters[name])  # type: ignore[arg-type]
            for owner in self.blocks:
                owner.pack(self._arena)

        if self._running is not None:
            earlier, last = self._running
            if last is not block:
                self._followers[earlier, id(last)] = block
        self._running = (now, block)

        following = self._expected()
        is_backward = now == "backward"
        self._send_away(block, following, is_backward)

        self._bring(block)
        if is_backward:
            self._bring_gradients(block)
        self._lane.wait(block.ticket)
        block.ticket = None
        block.changes |= self._updated == "device" and is_backward

        if following is not None:
            self._bring(following)
            if is_backward:
                self._bring_gradients(following)

    def _send_away(self, block: Block, following: Block | None, is_backward: bool) -> None:
        """Have all but a block and its successor leave the device: at once where the host has what
        they hold, else at a later call, while what they hold is copied to the host."""
        for other in self.blocks:
            is_near = other is block or other is following
            if not is_near and not self._store(other):
                self._empty(other)

            needs_gradients = is_near and is_backward
            if not needs_gradients and not self._store_gradients(other):
                self._empty_gradients(other)

    def _expected(self) -> Block | None:
        """The block that followed last time; at first, the next one in the order of the model."""
        assert self._running is not None
        now, block = self._running
        followed = self._followers.get((now, id(block)))
        if followed is not None:
            return followed

        index = self.blocks.index(block)
        if now == "backward" and index == 0:
            return None
        if now == "backward":
            return self.blocks[index - 1]

        if index + 1 < len(self.blocks):
            return self.blocks[index + 1]
        if now == "forward":
            return self.blocks[index - 1]  # the backward starts here
        return self.blocks[0]

    def _bring(self, block: Block) -> None:
        """Start to copy a block's weights to the device, if they are not there."""
        if block.on_device:
            return

        block.on_device = True
        try:
            block.ticket = self._lane.copy([memory.filled() for memory in block.memories])
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
        block.ticket = self._lane.copy([memory.stored() for memory in block.memories])
        self._stored = block.ticket
        return True

    def _made(self, block: Block, gradient: RestingGradient, _: nn.Parameter) -> None:
        """Note that autograd has made a gradient, or added to it."""
        block.gradients_on_device = True
        gradient.made()

    def _bring_gradients(self, block: Block) -> None:
        """Start to copy the gradients to the device that rest on the host."""
        if self._copy_any(block, [gradient.filled() for gradient in block.gradients.values()]):
            block.gradients_on_device = True

    def _store_gradients(self, block: Block) -> bool:
        """Start to copy the gradients to the host that are newer than what is there; whether there
        were any."""
        if not block.gradients_on_device:
            return False

        stored = [gradient.stored() for gradient in block.gradients.values()]
        if not self._copy_any(block, stored):
            return False
        self._stored = block.ticket
        return True

    def _copy_any(self, block: Block, pairs: Iterable[Pair | None]) -> bool:
        """Start the copies that there are to make; whether there were any."""
        copies = [pair for pair in pairs if pair is not None]
        if not copies:
            return False
        block.ticket = self._lane.copy(copies)
        return True

    def _empty_gradients(self, block: Block) -> None:
        """Free the memory of a block's gradients on the device."""
        if not block.gradients_on_device:
            return

        self._lane.wait(block.ticket)
        block.ticket = None
        block.gradients_on_device = False
        for gradient in block.gradients.values():
            gradient.empty()

    def _settle(self) -> None:
        """Have the host hold what every weight and gradient holds."""
        for block in self.blocks:
            self._store(block)
            self._store_gradients(block)
        self._lane.finish(self._stored)  # copies are done in order
        self._stored = None

    def _empty(self, block: Block) -> None:
        """Free the memory of a block's weights on the device."""
        if not block.on_device:
            return

        self._lane.wait(block.ticket)  # or an unfinished copy would write into freed memory
        block.ticket = None
        block.on_device = False
        for memory in block.memories:
            memory.empty()

    def _put_host_weights(
        self, block: Block, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        """Fill a state dict from the host, whether or not the weights are on the device."""
        self._settle()
        resting = {id(weight.weight): weight for weight in block.resting.values()}
        # Other parameters may share the memory of one.
        alone = {storage_key(weight.weight): weight for weight in block.resting.values()}
        for name, parameter in module._parameters.items():
            if parameter is None or prefix + name not in state:
                continue

            weight = resting.get(id(parameter))
            if weight is None and not is_traceable_wrapper_subclass(parameter):
                weight = alone.get(storage_key(parameter))
            if weight is not None:
                state[prefix + name] = weight.host_view()


def _own_slots(model: nn.Module, blocks: list[nn.Module], trained: bool) -> list[list[Slot]]:
    """Per block, the slots of weights, frozen or `trained` too, whose memory nothing outside the
    block shares."""
    block_of = _block_of(blocks)
    owners: dict[int, set[int | None]] = {}
    candidates = []
    for module in model.modules():
        owner = block_of.get(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue

            memory = _memory(parameter)
            owners.setdefault(memory, set()).add(owner)
            if owner is not None and (trained or not parameter.requires_grad):
                candidates.append((owner, memory, (module, name)))

    slots: list[list[Slot]] = [[] for _ in blocks]
    taken = set()
    for owner, memory, slot in candidates:
        if owners[memory] == {owner} and memory not in taken:
            taken.add(memory)  # tied inside one block: streamed once
            slots[owner].append(slot)
    return slots


def _block_of(blocks: list[nn.Module]) -> dict[nn.Module, int | None]:
    """The number of the block that each module is in; None where several share it."""
    block_of: dict[nn.Module, int | None] = {}
    for number, block in enumerate(blocks):
        for module in block.modules():
            block_of[module] = None if module in block_of else number
    return block_of


def _memory(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share their memory."""
    if is_traceable_wrapper_subclass(tensor):
        return id(tensor)
    return storage_key(tensor)


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """All tensors in what a module returns, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
        return

    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        parts = value

    for part in parts:
        yield from _tensors_in(part)
