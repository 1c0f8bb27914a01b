"""Pass after pass over a loader, and the place in it where a run that was stopped goes on.

Each pass begins with random numbers of its own, whatever was drawn before: a shuffling loader then has the same order
when a run is resumed. A loader that can tell and take its place (torchdata's StatefulDataLoader and what follows its
protocol: `state_dict`, `load_state_dict`) is put there; of any other, the batches that were trained on are drawn again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from autofit.training import random_state
from autofit.training.workload import batches_of, endless


class Passes(Iterator[Any]):
    """The batches of one training run, without an end.

    Args:
        seed: pass n draws from seed + n.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader, self._seed = loader, seed
        self._begun = self._given = 0
        self._batches = endless(self._one_pass)

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._given += 1
        return batch

    @property
    def place(self) -> str:
        """Where the last batch stood, both counted from 0."""
        return f"batch {self._given - 1} of pass {self._begun - 1}"

    def state(self) -> dict[str, Any] | None:
        """Where the loader stands after the last batch; None where it cannot tell."""
        if not self._tells_its_place():
            return None
        return {"passes": self._begun, "given": self._given, "loader": self._loader.state_dict()}

    def go_on(self, taken: int, state: dict[str, Any] | None, device: torch.device) -> None:
        """Skip the first `taken` batches, by the loader's state where it has one; draws no random number."""
        with random_state.kept(device):
            if state is None or not self._tells_its_place():
                for _ in range(taken):
                    next(self)
                return
            self._loader.load_state_dict(state["loader"])
            self._begun, self._given = state["passes"], state["given"]
            rest = batches_of(self._loader)  # none, where the run was stopped at the end of a pass
            self._batches = itertools.chain(rest, self._batches)

    def _one_pass(self) -> Iterator[Any]:
        random_state.seed_host(self._seed + self._begun)
        self._begun, self._given = self._begun + 1, 0
        return batches_of(self._loader)

    def _tells_its_place(self) -> bool:
        return all(callable(getattr(self._loader, name, None)) for name in ("state_dict", "load_state_dict"))
