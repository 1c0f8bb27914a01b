"""Synthetic batches: random samples of the largest shape a task can have, which memory and speed depend on alone.

The factories are plain data, so they reach a probe process, and the same n gives the same batch in every process. Fake
tensors can follow every operation. torch is imported where a batch is made, so that naming a model stays cheap.
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
    """Labels of a classifier as transformers expects them for each `problem_type`."""

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
    """n -> random token ids [n, sequence_length] and the labels of the task. No attention mask: every position counts,
    which is the worst case and what transformers assumes without one. The padding token is never drawn, because some
    models take it out of the count of positions. In masked-language modelling the first position is always predicted,
    so no sample is empty."""

    task: str
    sequence_length: int
    vocab_size: int
    pad_token_id: int | None = None
    labels: ClassLabels | None = None

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        padding = self.pad_token_id
        drawn = self.vocab_size if padding is None else self.vocab_size - 1
        ids = torch.randint(drawn, (n, self.sequence_length), generator=generator, device="cpu")
        if padding is not None:
            ids = ids + (ids >= padding)
        if self.labels is not None:
            return {"input_ids": ids, "labels": self.labels(n, generator)}
        if self.task == "causal-lm":
            return {"input_ids": ids, "labels": ids.clone()}
        masked = torch.rand(ids.shape, generator=generator, device="cpu") < MASKED_FRACTION
        masked[:, 0] = True
        return {"input_ids": ids, "labels": torch.where(masked, ids, -100)}


@dataclass(frozen=True)
class RandomImages:
    """n -> normally distributed pixels [n, channels, height, width] and class labels."""

    channels: int
    height: int
    width: int
    labels: ClassLabels

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        shape = (n, self.channels, self.height, self.width)
        pixels = torch.randn(shape, generator=generator, device="cpu")
        return {"pixel_values": pixels, "labels": self.labels(n, generator)}
