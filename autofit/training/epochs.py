"""Endless epochs over a loader, resumable in the middle of one.

Each epoch starts with random numbers of its own, so a shuffling loader has the same order when a run resumes. A loader
that can save and load its position (torchdata's StatefulDataLoader protocol: `state_dict`, `load_state_dict`) does so;
any other is read again up to the batch where the run stopped.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from autofit.training import random_state
from autofit.training.workload import batches_of, empty_pass


class Epochs(Iterator[Any]):
    """The batches of one training run, without an end; epoch n draws from seed + n."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader, self._seed = loader, seed
        self._epochs_begun = self._batches_given = 0
        self._is_stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._batches = self._endless()

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._batches_given += 1
        return batch

    @property
    def position(self) -> str:
        """The last batch and its epoch, both counted from 0."""
        return f"batch {self._batches_given - 1} of pass {self._epochs_begun - 1}"

    def state(self) -> dict[str, Any] | None:
        """The loader's position after the last batch; None where it cannot save one."""
        if not self._is_stateful:
            return None
        return {"passes": self._epochs_begun, "given": self._batches_given, "loader": self._loader.state_dict()}

    def skip(self, batches: int, state: dict[str, Any] | None, device: torch.device) -> None:
        """Skip the first batches, by the loader's state where it has one; draws no random number."""
        with random_state.preserved(device):
            if state is None or not self._is_stateful:
                for _ in range(batches):
                    next(self)
                return
            self._loader.load_state_dict(state["loader"])
            self._epochs_begun, self._batches_given = state["passes"], state["given"]
            remaining = batches_of(self._loader)  # none, if the run stopped at the end of an epoch
            self._batches = itertools.chain(remaining, self._batches)

    def _endless(self) -> Iterator[Any]:
        while True:
            random_state.seed_host(self._seed + self._epochs_begun)
            self._epochs_begun, self._batches_given = self._epochs_begun + 1, 0
            yield from batches_of(self._loader)
            if not self._batches_given:
                raise empty_pass()
