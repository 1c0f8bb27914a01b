"""A CopyLane that copies as late as a device may: what is not waited for is missing, what goes too soon is lost."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from autofit.setup.host_copies import CopyLane


class LateLane(CopyLane):
    """Copies only when somebody waits for them, and then all that were asked for before, in order."""

    def __init__(self) -> None:
        super().__init__(None)
        self.waiting: list[tuple[int, list[tuple[Any, Any]]]] = []
        self.asked = 0

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        self.asked += 1
        # Weak: on a device a copy that is still to run keeps no memory alive either.
        self.waiting.append((self.asked, [(weakref.ref(to), weakref.ref(source)) for to, source in pairs]))
        return self.asked

    def wait(self, ticket: Any) -> None:
        while ticket is not None and self.waiting and self.waiting[0][0] <= ticket:
            for to, source in self.waiting.pop(0)[1]:
                assert to() is not None, "the memory was let go before it was written to"
                assert source() is not None, "the memory was let go before it was copied"
                to().copy_(source())
