"""Output layers that tools put in the place of a model's own, or beside it.

Each keeps the class of the model that transformers makes, so that adapters, quantisation and
wrappers find its parts where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

# The rows of the head's weight that are read. Which ones they are decides what is learnt, and
# nothing of memory and time.
_WORDS = (0, 1)
_DROPOUT = 0.1  # before TRL's value head
_ENDINGS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel")


def read_two_words(model: nn.Module) -> None:
    """Let the head of a language model give one number for each token: how much more likely one
    word is than another one as the next. Its weight stays whole.

    Raises:
        InputError: the model has no linear head.
    """
    head = _linear_head(model)
    theirs: Any = model
    theirs.set_output_embeddings(_in_place_of(head, _two_words()))


def score_texts(model: nn.Module, numbers: int) -> None:
    """Put a new head on a model that generates texts, which gives some numbers for each text: those
    of its last token. As ms-swift makes classifiers of models that transformers has none of.

    Raises:
        InputError: the model has no linear head.
    """
    from torch import nn

    head = _linear_head(model)
    theirs: Any = model
    theirs.set_output_embeddings(nn.Identity())
    theirs.score = nn.Linear(head.in_features, numbers, bias=False)
    theirs.__class__ = _scoring(theirs.__class__)


def add_value_head(model: nn.Module) -> None:
    """Put a head beside a language model's own, which gives one number for each token, and holds
    all logits in float32 as well. As TRL's AutoModelForCausalLMWithValueHead.

    Raises:
        InputError: the model has no linear head.
    """
    from torch import nn

    head = _linear_head(model)
    theirs: Any = model
    theirs.set_output_embeddings(_in_place_of(head, _projection()))
    theirs.score = nn.Linear(head.in_features, 1)
    theirs.before_score = nn.Dropout(_DROPOUT)
    theirs.__class__ = _with_values(theirs.__class__)


def pass_hidden_states(model: nn.Module) -> None:
    """Let the head of a language model give what it is given, the hidden state of each token. Its
    weight stays, as where ms-swift trains embeddings.

    Raises:
        InputError: the model has no linear head.
    """
    head = _linear_head(model)
    theirs: Any = model
    theirs.set_output_embeddings(_in_place_of(head, _passing()))


# By name, heads that a tool gives a language model, whatever the task; "" for its own.
VALUES = "values"
PASSING = "passing"
HEADS: dict[str, Callable[[nn.Module], None]] = {
    VALUES: add_value_head,
    PASSING: pass_hidden_states,
}


def _linear_head(model: nn.Module) -> nn.Linear:
    from torch import nn

    theirs: Any = model
    head = theirs.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InputError("the model has no linear output layer.", "Choose another model.")

    return head


def _in_place_of(head: nn.Linear, kind: Any) -> nn.Module:
    """A layer of another class with the same weight, which stays tied to what it was tied to."""
    made: Any = kind(head.in_features, head.out_features, bias=False, device="meta")
    made.weight = head.weight
    if head.bias is not None:
        made.bias = head.bias

    return made  # type: ignore[no-any-return]


def _name_of_classifier(kind: type) -> str:
    """What a class of this name is called that tells classes, which the tasks of models are known
    by."""
    name = kind.__name__
    for ending in _ENDINGS:
        name = name.removesuffix(ending)

    return f"{name}ForSequenceClassification"


@cache
def _two_words() -> Any:
    from torch import nn

    class TwoWords(nn.Linear):
        """[..., features] -> [..., 1]; as ms-swift's get_generative_reranker_logits."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            rows = self.weight[list(_WORDS)]
            scores = nn.functional.linear(hidden, rows)
            return scores[..., :1] - scores[..., 1:]

    return TwoWords


@cache
def _passing() -> Any:
    class Passing(_projection()):  # type: ignore[misc]
        """[..., features] -> the same."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    return Passing


@cache
def _projection() -> Any:
    import torch
    from torch import nn

    class Projection(nn.Module):
        """A linear layer that is none of those that get adapters or are quantised."""

        def __init__(
            self,
            features: int,
            classes: int,
            *,
            bias: bool,
            device: str,
        ) -> None:
            super().__init__()
            self.in_features = features
            self.out_features = classes
            self.weight = nn.Parameter(torch.empty(classes, features, device=device))
            self.bias: nn.Parameter | None = None

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(hidden, self.weight, self.bias)

    return Projection


@cache
def _scoring(kind: Any) -> Any:
    """The class of a model that scores texts, of one that generates them."""
    import torch
    from transformers.loss.loss_utils import ForSequenceClassificationLoss
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    @functools.wraps(kind.forward)
    def forward(
        self: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        found = kind.forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            **inputs,
        )
        by_token = self.score(found.logits)

        # the token before the first one of padding, counted from the end where there is none
        pad = self.config.get_text_config().pad_token_id
        last = torch.eq(input_ids, pad).int().argmax(-1) - 1
        last = last % input_ids.shape[-1]
        rows = torch.arange(len(by_token), device=by_token.device)
        scores = by_token[rows, last]

        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, scores, self.config)
        return SequenceClassifierOutputWithPast(loss=loss, logits=scores)

    return type(_name_of_classifier(kind), (kind,), {"forward": forward})


def _values(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The value of each token; the wider copy of hidden states ends with it."""
    hidden = model.before_score(hidden)
    if hidden.dtype != model.score.weight.dtype:
        hidden = hidden.to(model.score.weight.dtype)
    values: torch.Tensor = model.score(hidden).squeeze(-1)

    return values


@cache
def _with_values(kind: Any) -> Any:
    """The class of a model with a value head, of one without."""
    import torch
    from transformers.modeling_outputs import TokenClassifierOutput

    @functools.wraps(kind.forward)
    def forward(self: Any, **inputs: Any) -> Any:
        found = kind.forward(self, **inputs, output_hidden_states=True)
        values = _values(self, found.hidden_states[-1])

        # nobody reads them
        logits = found.logits
        if logits.dtype != torch.float32:
            logits = logits.float()

        return TokenClassifierOutput(logits=values)

    return type(_name_of_classifier(kind), (kind,), {"forward": forward})
