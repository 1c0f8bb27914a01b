"""A CopyLane that copies as late as a device may: what is not waited for is missing, what goes too soon is lost."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from autofit.setup.host_copies import CopyLane, Layout


class LateLane(CopyLane):
    """Copies only when somebody waits for them, and then all that were asked for before, in order."""

    def __init__(self) -> None:
        super().__init__(None)
        self.waiting: list[tuple[int, list[tuple[Any, Any]]]] = []
        self.asked = 0
        self.copies = 0

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        self.asked += 1
        copies = [(_Memory(to), _Memory(source)) for to, source in pairs]
        self.copies += len(copies)
        self.waiting.append((self.asked, copies))
        return self.asked

    def wait(self, ticket: Any) -> None:
        while ticket is not None and self.waiting and self.waiting[0][0] <= ticket:
            for to, source in self.waiting.pop(0)[1]:
                assert to.is_there(), "the memory was let go before it was written to"
                assert source.is_there(), "the memory was let go before it was copied"
                to.tensor().copy_(source.tensor())


class _Memory:
    """The memory of a tensor, which is not kept alive: on a device a copy that is still to run keeps none either."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._layout, self._end = Layout.of(tensor), tensor.storage_offset() + tensor.numel()

    def is_there(self) -> bool:
        storage = self._storage()
        return storage is not None and storage.nbytes() >= self._end * self._layout.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        layout = self._layout
        return torch.empty(0, dtype=layout.dtype).set_(
            self._storage(), layout.offset, layout.size, layout.stride
        )
