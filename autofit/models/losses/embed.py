"""Sentence embeddings: texts that belong together get vectors of the same direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import is_whole, require
from autofit.core.tasks.embed import EMBED as TASK
from autofit.models.losses.last_token import at_last_token
from autofit.models.losses.preference import inputs_of

if TYPE_CHECKING:
    import torch

KINDS = ("negatives", "symmetric", "triplet")
POOLINGS = ("mean", "first", "last")


@dataclass(frozen=True)
class Embed:
    """(model, batch) -> the mean loss over samples of two or more texts.

    `input_ids` and `attention_mask` are [samples, texts, tokens]: a text, its partner, and further
    ones that do not belong to it. Embeddings are compared by their cosine.

    Args:
        scale: multiplies the cosines.
        kind: `negatives`, to tell each text's partner from all other texts of the batch (InfoNCE,
            arXiv:1705.00652, section 4.4); `symmetric`, each partner's text from the others, too;
            `triplet`, to bring it nearer than the third text by `margin`.
        margin: of triplets, in cosines.
        pooling: a text's embedding is the mean of its tokens' last hidden states, that of the first
            token, or that of the last one.
        dimensions: the loss is the mean over embeddings that are cut to so many numbers each
            (Matryoshka, arXiv:2205.13147); none: whole ones alone.

    Raises:
        InputError: for a value that it does not take.
    """

    scale: float = 20.0
    kind: str = "negatives"
    margin: float = 0.3
    pooling: str = "mean"
    dimensions: tuple[int, ...] = ()

    task: ClassVar[str] = TASK.name

    def __post_init__(self) -> None:
        require(self.scale > 0, "scale must be positive", self.scale)
        require(
            self.kind in KINDS,
            f"kind must be one of {', '.join(KINDS)}",
            self.kind,
        )
        rule = f"pooling must be one of {', '.join(POOLINGS)}"
        require(self.pooling in POOLINGS, rule, self.pooling)
        fine = all(is_whole(size, 1) for size in self.dimensions)
        require(fine, "dimensions must be positive whole numbers", self.dimensions)

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        return self.of_representations(self.represent(model, batch))

    def represent(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The embedding of each text, not normalised, [samples, texts, numbers]."""
        import torch

        inputs = inputs_of(batch)
        output = model(**inputs)
        # of a language model whose head gives what it is given, they stand for the logits
        hidden = output.logits if hasattr(output, "logits") else output.last_hidden_state
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(inputs["input_ids"])

        if self.pooling == "mean":
            weights = mask[..., None].float()
            vectors = (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)
        elif self.pooling == "first":
            rows = torch.arange(len(hidden), device=hidden.device)
            vectors = hidden[rows, mask.argmax(dim=1)].float()
        else:
            vectors = at_last_token(hidden, mask).float()

        by_sample: torch.Tensor = vectors.unflatten(0, batch["input_ids"].shape[:2])

        return by_sample

    def of_representations(self, vectors: torch.Tensor) -> torch.Tensor:
        """The loss of the embeddings of all samples of a batch."""
        import torch

        sizes = self.dimensions or (vectors.shape[-1],)
        losses = [self._of_vectors(vectors[..., :size]) for size in sizes]
        return torch.stack(losses).mean()

    def _of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        import torch

        texts, partners, *others = torch.nn.functional.normalize(vectors, dim=-1).unbind(dim=1)
        if self.kind == "triplet":
            require(bool(others), "a triplet has three texts", vectors.shape[1])
            near = (texts * partners).sum(dim=1)
            far = (texts * others[0]).sum(dim=1)

            return torch.relu(far - near + self.margin).mean()

        scores = self.scale * texts @ torch.cat([partners, *others]).T
        own = torch.arange(len(scores), device=scores.device)
        loss = torch.nn.functional.cross_entropy(scores, own)
        if self.kind == "symmetric":
            back = self.scale * partners @ texts.T
            loss = (loss + torch.nn.functional.cross_entropy(back, own)) / 2

        return loss


@dataclass(frozen=True)
class EmbedByMicroBatch:
    """The same of each micro-batch by itself, whose texts are told from one another alone: as
    ms-swift's InfoNCE trains, of each text's last token and with a temperature of 0.1."""

    scale: float = 10.0

    task: ClassVar[str] = TASK.name
    tool: ClassVar[str] = "msswift"
    count: ClassVar[None] = None

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        return Embed(self.scale, pooling="last")(model, batch)
