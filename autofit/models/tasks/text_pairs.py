"""Pairs of texts that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autofit.models.tasks.sizes import Asked, padding, positions
from autofit.models.tasks.text import SEED, random_ids

if TYPE_CHECKING:
    import torch

_LONGEST = 256  # tokens of a text unless given: such models are trained on sentences and paragraphs


@dataclass(frozen=True)
class RandomPairs:
    """n -> random token ids [n, 2, sequence_length] of n pairs of texts."""

    sequence_length: int
    vocab_size: int
    pad_token_id: int | None = None

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        shape = (n, 2, self.sequence_length)
        return {
            "input_ids": random_ids(
                shape,
                self.vocab_size,
                self.pad_token_id,
                generator,
            )
        }


def pair_batches(asked: Asked) -> RandomPairs:
    """The batches of a model that embeds texts, by its config."""
    text = asked.config.get_text_config()
    vocabulary = asked.size(text, "vocab_size")
    most = positions(text)
    usual = min(_LONGEST, most or _LONGEST)
    length = usual if asked.sequence_length is None else asked.length(most)

    return RandomPairs(length, vocabulary, padding(text, vocabulary))
