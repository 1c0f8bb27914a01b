"""What a model or its samples may differ by for the file of another tool, and an export has no
words for."""

from collections.abc import Mapping
from typing import Any

from autofit.models.huggingface import HEAD, OPTIONS, SPARES, TEXTS, TILES

_WORDS = {
    TEXTS: "several texts in a sample",
    HEAD: "a head of another tool",
    SPARES: "checkpoints of some blocks alone",
    TILES: "MLPs in tiles",
}
_BLOCKS = "num_hidden_layers"


def unsaid(source: Mapping[str, Any]) -> str | None:
    """The first of these that the `source:` of a result names, in words; None where it names none."""
    for key, words in _WORDS.items():
        if source.get(key) is not None:
            return words

    if _BLOCKS in (source.get(OPTIONS) or {}):
        return "blocks that are added"

    return None
