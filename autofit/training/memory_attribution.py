"""Who holds memory at a moment of a training: weights, gradients and optimizer state by block.

What lies beside the blocks is counted as well.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from autofit.core.measurement import OomSnapshot
from autofit.hardware.out_of_memory import asked_bytes
from autofit.setup import Setup
from autofit.setup.host_copies import plain_tensors
from autofit.setup.layers import repeated_blocks

_MOST = 5  # named owners


class MemoryAttribution:
    """Knows the blocks of a setup, and what each of them keeps of its last forward.

    `live` gives the bytes that all tensors on the device take now; it is None where nobody counts
    them, as on a CPU while it trains.
    """

    def __init__(self, setup: Setup, live: Callable[[], int] | None = None) -> None:
        self._setup = setup
        self._live = live
        self._blocks = repeated_blocks(setup.model)
        self._kept: dict[int, int] = {}  # bytes, by the number of the block

    @contextmanager
    def watching_forwards(self) -> Iterator[None]:
        """Note what each block keeps of the forwards inside."""
        live = self._live
        if live is None:
            yield
            return

        handles: list[Any] = []
        before: dict[int, int] = {}

        def begin(number: int, *_: Any) -> None:
            before[number] = live()

        def end(number: int, *_: Any) -> None:
            self._kept[number] = live() - before[number]

        for number, block in enumerate(self._blocks):
            handles += (
                block.register_forward_pre_hook(partial(begin, number)),
                block.register_forward_hook(partial(end, number)),
            )

        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def snapshot(self, asked: int | None) -> OomSnapshot:
        """What is held now, and by whom, where `asked` bytes more did not fit."""
        setup = self._setup
        phase = setup.progress.phase
        block_of = self._block_of()
        largest: Counter[str] = Counter()
        held = Counter(weights=0, gradients=0, optimizer=0)
        seen: set[int] = set()

        def count(kind: str, tensor: Any, block: int | None) -> None:
            """Count a tensor of an owner."""
            size = self._bytes_of(tensor, seen)
            held[kind] += size
            largest[_owner(kind, block)] += size

        tensors = [
            *setup.model.parameters(),
            *setup.model.buffers(),
        ]
        for tensor in tensors:
            count(
                "weights",
                tensor,
                block_of.get(tensor),
            )

        for tensor in tensors:
            if tensor.grad is not None:
                count(
                    "gradients",
                    tensor.grad,
                    block_of.get(tensor),
                )

        state: dict[Any, Any] = setup.optimizer.state
        for weight, of_weight in state.items():
            for value in tree_iter(of_weight):
                count(
                    "optimizer",
                    value,
                    block_of.get(weight),
                )

        if self._live:
            held["others"] = max(0, self._live() - held.total())
            if phase == "forward":  # a backward gives them up, one after the other
                for number, size in self._kept.items():
                    largest[_owner("activations", number)] = size

        named = {owner: size for owner, size in largest.most_common(_MOST) if size > 0}
        return OomSnapshot(
            phase,
            asked,
            dict(held),
            named,
        )

    def _block_of(self) -> dict[Any, int]:
        """The number of the block that each tensor of the model lies in."""
        blocks = {}
        for number, block in enumerate(self._blocks):
            for tensor in (*block.parameters(), *block.buffers()):
                blocks[tensor] = number

        return blocks

    def _bytes_of(self, value: Any, seen: set[int]) -> int:
        """Bytes on the device of storages that were not counted before."""
        if not isinstance(value, torch.Tensor):
            return 0

        total = 0
        device_type = self._setup.device.type
        for tensor in plain_tensors(value):
            storage = tensor.untyped_storage()
            if tensor.device.type == device_type and storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()

        return total


def oom_snapshot(setup: Setup, error: BaseException) -> OomSnapshot:
    """What is held where a training runs out of memory."""
    live = None
    if setup.device.type == "cuda":
        live = partial(torch.cuda.memory_allocated, setup.device)

    return MemoryAttribution(setup, live).snapshot(asked_bytes(error))


def _owner(kind: str, block: int | None) -> str:
    """The name of what holds memory of a kind."""
    if block is None:
        return f"{kind} beside the blocks"
    return f"{kind} of block {block}"
