"""Synthetic batches: random samples of the largest shape a task can have, which is all that memory and speed depend on.

The factories are plain data, so that they reach a probe process, and the same n gives the same batch in every process.
Everything is made with operations that fake tensors can follow. torch is imported where a batch is made, so that naming
a model stays cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SEED = 0
MASKED_FRACTION = 0.15  # of the tokens in masked-language modelling: BERT, arXiv:1810.04805, section 3.1


@dataclass(frozen=True)
class ClassLabels:
    """Labels of a classifier as transformers wants them for each `problem_type`."""

    classes: int
    problem_type: str = "single_label_classification"

    def __call__(self, n: int, generator: torch.Generator) -> torch.Tensor:
        """Labels of n samples: class numbers [n], or float targets [n, classes] ([n] for one regression output)."""
        import torch

        if self.problem_type == "single_label_classification":
            return torch.randint(self.classes, (n,), generator=generator, device="cpu")
        if self.problem_type == "multi_label_classification":
            return torch.randint(2, (n, self.classes), generator=generator, device="cpu").float()
        shape = (n,) if self.classes == 1 else (n, self.classes)
        return torch.randn(shape, generator=generator, device="cpu")


@dataclass(frozen=True)
class RandomTokens:
    """n -> random token ids [n, sequence_length] and the labels of the task.

    No attention mask: every position counts, which is the worst case and what transformers assumes without one. The
    padding token is never drawn, because some models take it out of the count of positions.
    """

    task: str
    sequence_length: int
    vocab_size: int
    pad_token_id: int | None = None
    labels: ClassLabels | None = None

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        """A batch of n samples."""
        generator = _generator()
        ids = self._ids(n, generator)
        if self.labels is not None:
            return {"input_ids": ids, "labels": self.labels(n, generator)}
        labels = ids.clone() if self.task == "causal-lm" else _masked(ids, generator)
        return {"input_ids": ids, "labels": labels}

    def _ids(self, n: int, generator: torch.Generator) -> torch.Tensor:
        import torch

        padding = self.pad_token_id
        drawn = self.vocab_size if padding is None else self.vocab_size - 1
        ids = torch.randint(drawn, (n, self.sequence_length), generator=generator, device="cpu")
        return ids if padding is None else ids + (ids >= padding)


@dataclass(frozen=True)
class RandomImages:
    """n -> normally distributed pixels [n, channels, height, width] and class labels."""

    channels: int
    height: int
    width: int
    labels: ClassLabels

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        """A batch of n samples."""
        import torch

        generator = _generator()
        shape = (n, self.channels, self.height, self.width)
        pixels = torch.randn(shape, generator=generator, device="cpu")
        return {"pixel_values": pixels, "labels": self.labels(n, generator)}


def _masked(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The ids where a token is to be predicted, -100 elsewhere; the first position always is, so no sample is empty."""
    import torch

    chosen = torch.rand(ids.shape, generator=generator, device="cpu") < MASKED_FRACTION
    chosen[:, 0] = True
    return torch.where(chosen, ids, -100)


def _generator() -> torch.Generator:
    import torch

    return torch.Generator(device="cpu").manual_seed(SEED)
