"""What synthetic batches are made from: a model's config, read key by key with one sentence for
what is wrong."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import InputError, is_whole, require, shown
from autofit.core.task import Task

SEQUENCE_LENGTH = 2048  # unless given, or the model's maximum is shorter

# RoBERTa and its children number positions from pad_token_id + 1, and have that many positions
# fewer than embeddings.
OFFSET_POSITIONS = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)

YOUR_FUNCTION = (
    "Give a function of yours that returns an autofit.Workload: --model file.py:function."
)


@dataclass(frozen=True)
class Asked:
    """The data that is asked for: of which model, for which task, and how long.

    `config` is transformers' own.
    """

    name: str
    task: Task
    config: Any
    sequence_length: int | None = None
    arguments: tuple[str, ...] = ()  # of the forward, where batches depend on them
    sees: bool = False  # whether an image stands in each text
    texts: int = 1  # of a sample

    def size(self, config: Any, *keys: str, default: int | None = None) -> int:
        """The first of the keys that the config has.

        Raises:
            InputError: no positive number, or none and no default.
        """
        found = [key for key in keys if getattr(config, key, None) is not None]
        name = (found or keys)[0]
        value = getattr(config, name, default)

        if type(value) is not int or value < 1:
            message = f"the config of {self.name} needs a positive {name}, not {shown(value)}."
            raise InputError(message, "Correct config.json.")

        return value

    def length(self, maximum: int | None, shortest: int = 1) -> int:
        """The tokens of a sample.

        Raises:
            InputError: a length that the model cannot have.
        """
        if maximum is None:
            maximum = sys.maxsize
        given = self.sequence_length
        if given is None:
            return min(SEQUENCE_LENGTH, maximum)

        rule = f"the sequence length must be a whole number of at least {shortest}"
        require(is_whole(given, shortest), rule, given, "For example 2048.")
        if given > maximum:
            message = (
                f"{self.name} takes sequences of at most {maximum} tokens, not {shown(given)}."
            )
            raise InputError(message, f"Give {maximum} or less.")

        return given

    def no_length(self, what: str) -> None:
        """Raise InputError if a sequence length is asked for although samples are `what`."""
        if self.sequence_length is not None:
            message = f"{self.name} is trained on {what}, which have no sequence length."
            raise InputError(message, "Leave the sequence length out.")


def whole_numbers(config: Any, *keys: str) -> list[int]:
    """What a config has under those of the keys that hold a whole number."""
    values = [getattr(config, key, None) for key in keys]
    return [value for value in values if isinstance(value, int)]


def positions(text: Any) -> int | None:
    """The longest sequence a text config allows; None where it sets no limit."""
    maximum = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not isinstance(maximum, int) or maximum < 1:
        return None

    pad = padding(text)
    if pad is not None and text.model_type in OFFSET_POSITIONS:
        maximum -= pad + 1
    return maximum


def padding(text: Any, vocabulary: float = math.inf) -> int | None:
    """The padding token; None also where foreign code has no such key, -1 for none, or one beyond
    the vocabulary."""
    token = getattr(text, "pad_token_id", None)
    if not isinstance(token, int) or not 0 <= token < vocabulary:
        return None
    return token
