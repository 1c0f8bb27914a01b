"""Prompts with completions that the model generated, and what rewards say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autofit.core.task import IGNORED_LABEL
from autofit.core.workload import REFERENCE
from autofit.models.losses.grpo import ADVANTAGES, GRPO, OLD
from autofit.models.tasks.sizes import Asked, padding, positions
from autofit.models.tasks.text import SEED, random_ids

if TYPE_CHECKING:
    import torch

_LONGEST = 1024  # tokens of a prompt and its completion, unless given: TRL's 512 of each


@dataclass(frozen=True)
class RandomCompletions:
    """n -> n random prompts with completions: `input_ids`, `attention_mask`, `labels`
    [n, sequence_length], `advantages` [n], `old` [n, completion_length] and, where the loss asks
    the model before training, `reference` of the same shape."""

    sequence_length: int
    completion_length: int
    vocab_size: int
    pad_token_id: int | None
    loss: GRPO

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        shape = (n, self.sequence_length)
        ids = random_ids(shape, self.vocab_size, self.pad_token_id, generator)

        labels = ids.clone()
        labels[:, : self.sequence_length - self.completion_length] = IGNORED_LABEL
        of_tokens = torch.zeros(n, self.completion_length, device="cpu")
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
            ADVANTAGES: torch.randn(n, generator=generator, device="cpu"),
            OLD: of_tokens,
        }
        if self.loss.beta:
            batch[REFERENCE] = of_tokens.clone()

        return batch

    def count(self, batch: Mapping[str, torch.Tensor]) -> float:
        """What the mean of the loss is over."""
        return self.loss.count(batch)


def completion_batches(asked: Asked) -> RandomCompletions:
    """The batches of a model that learns from rewards, by its config; half of each is the prompt."""
    text = asked.config.get_text_config()
    vocabulary = asked.size(text, "vocab_size")
    most = positions(text)
    usual = min(_LONGEST, most or _LONGEST)
    length = usual if asked.sequence_length is None else asked.length(most, 2)
    half = length - length // 2

    return RandomCompletions(length, half, vocabulary, padding(text, vocabulary), GRPO())
