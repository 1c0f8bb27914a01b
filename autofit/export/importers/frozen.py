"""Which weights a file of another tool trains where it trains no adapters, and not all weights."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autofit.core.errors import InputError, shown
from autofit.core.knobs.activation_checkpointing import KNOB as CHECKPOINTING
from autofit.training.meta_model import meta_model_from

# What older versions of transformers, and checkpoints, call modules of a kind of model.
_OLDER = {"mixtral": (".mlp.", ".block_sparse_moe.")}
_READER = "model.language_model."
# Where transformers checkpoints layers it asks for gradients of what the embeddings give.
BY_CHECKPOINTING = (CHECKPOINTING.name,)


class Weights:
    """The weights of a model, by what its tool calls them.

    Attributes:
        kind: its model_type.
    """

    def __init__(self, factory: Callable[[], Any], config: Mapping[str, Any]) -> None:
        self._factory = factory
        self._config = config
        self.kind = str(config.get("model_type"))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How many numbers each holds, in the order of the model's."""
        model = meta_model_from(self._factory)
        return {name: weight.numel() for name, weight in model.named_parameters()}

    @property
    def blocks(self) -> int:
        """How many blocks read texts; 0 where the config does not say."""
        text = {**self._config, **self._config.get("text_config", {})}
        for key in ("num_hidden_layers", "num_layers", "n_layer"):
            if isinstance(text.get(key), int):
                return int(text[key])

        return 0

    def matching(self, matches: Callable[[str], object]) -> set[str]:
        """Those whose names fulfil a condition; if none does, those whose older names do."""
        found = {name for name in self.sizes if matches(name)}
        if found:
            return found

        return {name for name in self.sizes if any(map(matches, self._older(name)))}

    def _older(self, name: str) -> Iterator[str]:
        """What a weight is called by older versions and by checkpoints."""
        if self.kind in _OLDER:
            new, old = _OLDER[self.kind]
            yield name.replace(new, old)

        if not name.startswith("model."):
            return
        inner = name.removeprefix("model.")
        if "text_config" in self._config and not name.startswith(_READER):
            yield _READER + inner
        yield inner


@dataclass(frozen=True)
class Trained:
    """What is trained.

    Attributes:
        names: of the weights.
        asks_inputs: whether gradients flow back to what the embeddings give, trained or not.
        holds: the knobs that decide it, which stay as they are.
        notes: sentences for the user.
    """

    names: Collection[str]
    asks_inputs: bool = False
    holds: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def list_of_words(key: str, value: Any) -> list[str]:
    """The words of a key, which takes one or several.

    Raises:
        InputError: the value is anything else.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return list(value)
    raise InputError(f"{key} must be a list of names, not {shown(value)}.", "Correct it.")


def pattern_of(key: str, text: str) -> re.Pattern[str]:
    """A regular expression.

    Raises:
        InputError: it is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        message = f"{key}: {shown(text)} is no pattern: {error}."
        raise InputError(message, "Correct it.") from error


def first_weights(weights: Weights, share: float) -> set[str]:
    """The first weights of a model that together hold at most a share of its numbers."""
    most = int(sum(weights.sizes.values()) * share)
    found = set()
    total = 0
    for name, size in weights.sizes.items():
        total += size
        if total > most:
            break
        found.add(name)

    return found


def beginning_with(weights: Weights, prefixes: Sequence[str]) -> set[str]:
    """The weights whose names begin with one of these."""
    found: set[str] = set()
    for prefix in prefixes:
        found |= {name for name in weights.sizes if name.startswith(prefix)}

    return found
