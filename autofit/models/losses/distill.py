"""Distillation: to say of each next token what a larger model says of it (Hinton et al. 2015,
arXiv:1503.02531; Agarwal et al. 2023, arXiv:2306.13649)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.errors import is_whole, require
from autofit.core.task import IGNORED_LABEL, TEACHER
from autofit.core.tasks.distill import DISTILL as TASK
from autofit.models.losses.by_token import by_token

if TYPE_CHECKING:
    import torch

_NEVER = -1e4  # a log-probability of 0, with which differences are still numbers
_NEARLY_SURE = -1e-7  # the largest log-probability below 0 in fp32


@dataclass(frozen=True)
class Distill:
    """(models, batch) -> the mean divergence of the model from its teacher, over tokens that count.

    The teacher is `models["teacher"]`. Where one vocabulary is longer, by padding, its end is left
    out.

    Args:
        mixture: 0: forward KL(teacher || model); 1: reverse KL(model || teacher); between: the
            generalised Jensen-Shannon divergence (arXiv:2306.13649, equation 1, beta).
        temperature: divides the logits of both.
        top_k: so many of the teacher's most likely tokens are compared, and all others together as
            one more; nothing else of what the teacher says stays in memory. 0: all tokens.

    Raises:
        InputError: for a value that it does not take.
    """

    mixture: float = 0.0
    temperature: float = 1.0
    top_k: int = 0

    task: ClassVar[str] = TASK.name
    reads_by_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fine = 0 <= self.mixture <= 1
        require(fine, "mixture must be from 0 (forward KL) to 1 (reverse KL)", self.mixture)
        require(self.temperature > 0, "temperature must be positive", self.temperature)
        require(is_whole(self.top_k, 0), "top_k must be a whole number, or 0", self.top_k)

    def __call__(self, models: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        with torch.no_grad():  # first, while the model has saved nothing for its backward
            theirs = models[TEACHER](**inputs).logits
            kept: tuple[torch.Tensor, ...] = (theirs,)
            is_deferred = hasattr(theirs, "by_token")  # then some tokens have logits at a time
            if self.top_k and not is_deferred:
                kept = self._most_likely(theirs)
            del theirs

        ours = models["model"](**inputs).logits

        counts = batch["labels"][:, 1:] != IGNORED_LABEL
        divergences = by_token(self._divergence, ours, *kept)[:, :-1]
        loss: torch.Tensor = (divergences * counts).sum() / counts.sum()
        return loss

    def _divergence(self, ours: torch.Tensor, *theirs: torch.Tensor) -> torch.Tensor:
        """Of logits [tokens, vocabulary] from what is kept of the teacher's, [tokens]."""
        if self.top_k:
            kept = theirs if len(theirs) > 1 else self._most_likely(*theirs)
            return self._of_most_likely(ours, *kept)

        (whole,) = theirs
        shared = min(ours.shape[-1], whole.shape[-1])
        known = [self._log_probabilities(logits[:, :shared]) for logits in (ours, whole)]
        return self._between(*known)

    def _most_likely(self, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest log-probabilities of logits and whose they are, each [..., top_k]."""
        most = min(self.top_k, theirs.shape[-1])
        values, tokens = self._log_probabilities(theirs).topk(most, dim=-1)

        return values, tokens

    def _of_most_likely(
        self,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """The divergence over the teacher's most likely tokens and all others as one, [tokens]."""
        last = ours.shape[-1] - 1
        is_unknown = tokens > last  # to the model, whose vocabulary is shorter
        ours = self._log_probabilities(ours).gather(-1, tokens.clamp(max=last))
        known = [logs.masked_fill(is_unknown, _NEVER) for logs in (ours, theirs)]

        return self._between(*map(_with_others, known))

    def _log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits.float() / self.temperature).log_softmax(dim=-1)

    def _between(self, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """The divergence of log-probabilities [tokens, outcomes], [tokens]."""
        import torch

        share = self.mixture
        if share == 0:
            return _kl(theirs, ours)
        if share == 1:
            return _kl(ours, theirs)

        mixed = torch.logaddexp(ours + math.log1p(-share), theirs + math.log(share))
        return share * _kl(theirs, mixed) + (1 - share) * _kl(ours, mixed)


def _with_others(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Those of some outcomes, and that of none of them, [tokens, outcomes + 1]."""
    import torch

    some = log_probabilities.logsumexp(dim=-1, keepdim=True)
    others = torch.log(-torch.expm1(some.clamp(max=_NEARLY_SURE)))
    return torch.cat([log_probabilities, others], dim=-1)


def _kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """KL(of || to) of log-probabilities [tokens, vocabulary], [tokens]."""
    import torch

    return torch.nn.functional.kl_div(to, of, reduction="none", log_target=True).sum(dim=-1)
