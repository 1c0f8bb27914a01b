"""Sentence embeddings: pairs of texts, and a loss that brings those of a pair together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.models.tasks.sizes import Asked, padding, positions
from autofit.models.tasks.text import SEED, random_ids

if TYPE_CHECKING:
    import torch

_SCALE = 20.0  # of cosines: MultipleNegativesRankingLoss of sentence-transformers has no other by default
_LONGEST = 256  # tokens of a text unless given: such models are trained on sentences and paragraphs


def pair_loss(model: Any, batch: Any) -> torch.Tensor:
    """The mean cross-entropy of telling each text's partner from those of all others in the batch: InfoNCE with
    in-batch negatives (arXiv:1705.00652, section 4.4), on the mean of the last hidden states."""
    import torch

    inputs = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
    hidden = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[..., None].to(
        hidden.dtype
    )
    means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    first, second = (
        torch.nn.functional.normalize(means.float(), dim=-1).unflatten(0, (-1, 2)).unbind(1)
    )
    scores = _SCALE * first @ second.T
    return torch.nn.functional.cross_entropy(
        scores, torch.arange(len(scores), device=scores.device)
    )


@dataclass(frozen=True)
class RandomPairs:
    """n -> random token ids [n, 2, sequence_length] of n pairs of texts. `loss` is what they are trained with."""

    sequence_length: int
    vocab_size: int
    pad_token_id: int | None = None
    loss = staticmethod(pair_loss)

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        shape = (n, 2, self.sequence_length)
        return {"input_ids": random_ids(shape, self.vocab_size, self.pad_token_id, generator)}


def pair_batches(asked: Asked) -> RandomPairs:
    """The batches of a model that embeds texts, by its config."""
    text = asked.config.get_text_config()
    vocabulary = asked.size(text, "vocab_size")
    most = positions(text)
    usual = min(_LONGEST, most or _LONGEST)
    length = usual if asked.sequence_length is None else asked.length(most)
    return RandomPairs(length, vocabulary, padding(text, vocabulary))
