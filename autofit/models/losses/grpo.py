"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and what followed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import InputError, require
from autofit.core.task import IGNORED_LABEL
from autofit.core.tasks.grpo import GRPO as TASK
from autofit.core.workload import REFERENCE, TRAINED
from autofit.models.losses.by_token import by_token
from autofit.models.losses.preference import input_names

if TYPE_CHECKING:
    import torch

BY_SAMPLE = TASK.name  # the mean of the paper that named the task
KINDS = ("dapo", BY_SAMPLE, "bnpo", "dr_grpo")
ADVANTAGES = "advantages"
OLD = "old"


@dataclass(frozen=True)
class GRPO:
    """(model, batch) -> the clipped policy loss of completions, equations 3 and 4; (models, batch)
    where beta is not 0.

    A batch holds `input_ids`, `attention_mask` and `labels` [samples, tokens], -100 but where the
    completion is, which ends each row; `advantages` [samples]; as `old` [samples, completion
    tokens] the log-probabilities by the model that generated, and as `reference` of the same shape
    those before training, unless that model is there to be asked. Without `old`, the model is
    taken to be the one that generated.

    Args:
        beta: how closely the model is held to the reference; 0: there is none.
        kind: what the mean is over: `dapo` (arXiv:2503.14476, equation 8) and `bnpo`: the tokens
            of completions; `grpo`: the samples, of each the mean over its tokens; `dr_grpo`
            (arXiv:2503.20783): the samples, by the longest completion.
        epsilon, epsilon_high: how far the ratio of probabilities may fall and rise until it is
            clipped; epsilon_high 0: as far as it may fall.
        temperature: of the generation, by which logits are divided.

    Raises:
        InputError: for a value that it does not take.
    """

    beta: float = 0.0
    kind: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float = 0.0
    temperature: float = 1.0

    task: ClassVar[str] = TASK.name
    reads_by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS,
            f"kind must be one of {', '.join(KINDS)}",
            self.kind,
        )
        require(self.beta >= 0, "beta must be at least 0", self.beta)
        require(self.temperature > 0, "temperature must be positive", self.temperature)
        require(0 < self.epsilon < 1, "epsilon must be between 0 and 1", self.epsilon)
        require(
            self.epsilon_high >= 0,
            "epsilon_high must be at least 0",
            self.epsilon_high,
        )

    @property
    def frozen(self) -> Mapping[str, None]:
        """The further models that it asks: a copy of the trained one where beta is not 0."""
        return {REFERENCE: None} if self.beta else {}

    def count(self, batch: Mapping[str, torch.Tensor]) -> float:
        """What the mean is over: the tokens of completions, or the samples."""
        if self.kind in (BY_SAMPLE, "dr_grpo"):
            return len(batch["labels"])
        return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())

    def __call__(self, models: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        model = models
        before = None
        if self.beta:
            # first, while the trained model has saved nothing for its backward
            before = self.precomputed(models, batch)
            model = models[TRAINED]

        now = self.log_probabilities(model, batch)
        old = batch.get(OLD)
        if old is None:
            old = now.detach()

        ratio = torch.exp(now - old)
        highest = 1 + (self.epsilon_high or self.epsilon)
        clipped = ratio.clamp(1 - self.epsilon, highest)
        advantages = batch[ADVANTAGES].unsqueeze(1)
        losses = -torch.min(ratio * advantages, clipped * advantages)

        if before is not None:
            difference = before - now
            distance = torch.exp(difference) - difference - 1
            # The ratio makes the gradient that of the reverse KL (arXiv:2512.02556, equation 7).
            losses = losses + self.beta * distance * ratio

        return self._mean(losses, _labels(batch, now.shape[1]) != IGNORED_LABEL)

    def _mean(self, losses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The mean of losses [samples, completion tokens] over those tokens that count."""
        summed = (losses * counts).sum(dim=1)
        tokens = counts.sum(dim=1)
        if self.kind == BY_SAMPLE:
            return (summed / tokens.clamp(min=1)).mean()
        if self.kind == "dr_grpo":
            return summed.mean() / losses.shape[1]

        return summed.sum() / tokens.sum().clamp(min=1)

    def precomputed(self, models: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        """What batches may hold as "reference": log-probabilities, [samples, completion tokens].

        Raises:
            InputError: the batch does not hold them, and there is no such model.
        """
        import torch

        if REFERENCE in models:
            with torch.no_grad():
                return self.log_probabilities(models[REFERENCE], batch)

        if REFERENCE not in batch:
            message = f'the batches lack "{REFERENCE}", the log-probabilities before training.'
            raise InputError(
                message, "Set reference to resident, or to adapter-off with lora_rank."
            )

        log_probabilities: torch.Tensor = batch[REFERENCE]

        return log_probabilities

    def log_probabilities(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Of the tokens of completions, [samples, completion tokens]; of padding, of token 0."""
        import torch

        width = completion_width(batch)
        inputs = {name: batch[name] for name in input_names(batch)}
        logits = model(**inputs, logits_to_keep=width + 1).logits
        successors = torch.nn.functional.pad(_labels(batch, width).clamp(min=0), (0, 1))

        return by_token(self._selected, logits, successors)[:, :-1]

    def _selected(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of classes [tokens], in float32."""
        import torch

        scaled = logits.float() / self.temperature
        return -torch.nn.functional.cross_entropy(scaled, classes, reduction="none")


def completion_width(batch: Mapping[str, Any]) -> int:
    """The tokens of the longest completion.

    By a shape where one tells it: a trace has no values.
    """
    for name in (OLD, REFERENCE):
        if name in batch:
            return int(batch[name].shape[1])

    is_completion = (batch["labels"] != IGNORED_LABEL).any(dim=0)

    return len(is_completion) - int(is_completion.int().argmax())


def _labels(batch: Mapping[str, Any], width: int) -> torch.Tensor:
    labels: torch.Tensor = batch["labels"][:, -width:]
    return labels
