"""Who holds memory at a moment of a training: weights, gradients and optimizer state by block, and what is beside."""

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
_BESIDE = "beside the blocks"


class MemoryAttribution:
    """Knows the blocks of a setup, and what each has kept of its last forward.

    `live`: the bytes that all tensors on the device take now; None where nobody counts them, as on a CPU while it
    trains.
    """

    def __init__(self, setup: Setup, live: Callable[[], int] | None = None) -> None:
        self._setup = setup
        self._live = live
        self._blocks = repeated_blocks(setup.model)
        self._kept: dict[int, int] = {}

    @contextmanager
    def watching_forwards(self) -> Iterator[None]:
        """Note what each block keeps of the forwards inside."""
        live = self._live
        handles: list[Any] = []
        before: dict[int, int] = {}

        def begin(number: int, *_: Any) -> None:
            before[number] = live() if live else 0

        def end(number: int, *_: Any) -> None:
            self._kept[number] = (live() if live else 0) - before[number]

        for number, block in enumerate(self._blocks if live else ()):
            handles.append(block.register_forward_pre_hook(partial(begin, number)))
            handles.append(block.register_forward_hook(partial(end, number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def snapshot(self, asked: int | None) -> OomSnapshot:
        """What is held now, and by whom."""
        setup = self._setup
        owners = self._owners()
        phase = setup.progress.phase
        state: dict[Any, Any] = setup.optimizer.state
        largest: Counter[str] = Counter()
        held: dict[str, int] = {}
        seen: set[int] = set()

        def count(kind: str, tensors: Any) -> None:
            sizes: Counter[int | None] = Counter()
            for owner, tensor in tensors:
                sizes[owner] += self._bytes_of(tensor, seen)
            held[kind] = sizes.total()
            largest.update({_holder(kind, owner): size for owner, size in sizes.items()})

        named = [*setup.model.parameters(), *setup.model.buffers()]
        count("weights", [(owners.get(each), each) for each in named])
        count(
            "gradients", [(owners.get(each), each.grad) for each in named if each.grad is not None]
        )
        count(
            "optimizer",
            [
                (owners.get(each), leaf)
                for each, of_one in state.items()
                for leaf in tree_iter(of_one)
            ],
        )
        if self._live:
            held["others"] = max(0, self._live() - sum(held.values()))
            if phase == "forward":  # a backward gives them up, one after the other
                largest.update(
                    {_holder("activations", number): size for number, size in self._kept.items()}
                )
        return OomSnapshot(
            phase, asked, held, dict(item for item in largest.most_common(_MOST) if item[1] > 0)
        )

    def _owners(self) -> dict[Any, int]:
        return {
            tensor: number
            for number, block in enumerate(self._blocks)
            for tensor in (*block.parameters(), *block.buffers())
        }

    def _bytes_of(self, value: Any, seen: set[int]) -> int:
        """Bytes on the device of storages that were not counted before."""
        total = 0
        for tensor in plain_tensors(value) if isinstance(value, torch.Tensor) else ():
            storage = tensor.untyped_storage()
            if tensor.device.type == self._setup.device.type and storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total


def oom_snapshot(setup: Setup, error: BaseException) -> OomSnapshot:
    """What is held where a training runs out of memory."""
    on_cuda = setup.device.type == "cuda"
    return MemoryAttribution(
        setup, (lambda: torch.cuda.memory_allocated(setup.device)) if on_cuda else None
    ).snapshot(asked_bytes(error))


def _holder(kind: str, block: int | None) -> str:
    return f"{kind} {_BESIDE}" if block is None else f"{kind} of block {block}"
