"""The weights that evaluated best, which a training that ends with others goes back to."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from autofit.core.errors import as_input_error, describe_error
from autofit.setup import Setup
from autofit.training import sharded_state
from autofit.training.atomic_writes import atomic_files
from autofit.training.host_tensors import Tensors, detached, each_once, gathered

FILE = "best.safetensors"


class BestWeights:
    """Trained weights and buffers of the best evaluation so far.

    They lie in a file of the output directory, where a resumed run finds them, else in host memory,
    each rank's own.
    """

    def __init__(self, setup: Setup, directory: Path | None, *, is_resumed: bool) -> None:
        self._setup = setup
        self._path = directory / FILE if directory else None
        self._held: Tensors = {}
        self.step: int | None = None
        self.score = float("-inf")

        if is_resumed and self._path and self._path.exists():
            with _named(self._path), safe_open(self._path, "pt") as file:
                noted = json.loads(file.metadata()["best"])
                self.step = int(noted["step"])
                self.score = float(noted["score"])

    def offer(self, step: int, score: float) -> bool:
        """Keep the weights as they are now if they score higher; all ranks call this together."""
        if score <= self.score:
            return False

        self.step = step
        self.score = score

        if self._path is None:
            self._held = {}
            for name, value in self._tensors().items():
                self._held[name] = value.detach().to("cpu", copy=True)
            return True

        whole = gathered(self._tensors(), self._setup.ranks)
        if self._setup.ranks.is_first:
            noted = json.dumps({"step": step, "score": score})
            tensors = detached(each_once(whole).items())
            with atomic_files(
                self._path.parent,
                what="the best weights",
                needed_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            ) as folder:
                save_file(
                    tensors,
                    folder / FILE,
                    metadata={"best": noted},
                )

        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Load the best weights into the model; all ranks call this together."""
        tensors = self._tensors()
        if self._path is None:
            for name, value in self._held.items():
                tensors[name].copy_(value)
            return

        self._setup.ranks.largest(0.0)  # the first rank has written the file by now
        with _named(self._path), safe_open(self._path, "pt") as file:
            for name in tensors.keys() & file.keys():  # of tied weights, one name alone
                tensors[name].copy_(
                    sharded_state.shard_of(
                        file.get_tensor(name),
                        tensors[name],
                    )
                )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._setup.trained_values()) | dict(self._setup.model.named_buffers())


def _named(path: Path) -> Any:
    """Inside, an error is one sentence about the file."""
    return as_input_error(
        lambda error: f"{path} cannot be read: {describe_error(error)}.",
        "Delete it, and resume.",
    )
