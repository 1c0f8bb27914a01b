"""Texts within the tokens that a tokenizer puts around them ([CLS] ... [SEP])."""

from typing import Any

import numpy as np

from autofit.data.byte_tokenizer import byte_ids, is_byte_tokenizer


def framed_ids(
    tokenizer: Any,
    texts: list[str],
    argument: str,
    length: int,
) -> tuple[list[Any], list[Any], list[bool]]:
    """Texts within the tokens that the tokenizer puts around them, cut to the length.

    Args:
        argument: of the tokenizer's call, which the texts are.

    Returns:
        Of each text its ids, a mask of those that the tokenizer put there, and whether it was cut.
    """
    if is_byte_tokenizer(tokenizer):  # which puts nothing around a text
        rows = list(map(byte_ids, texts))
        ids = [row[:length] for row in rows]
        return ids, list(map(np.zeros_like, rows)), are_longer(rows, length)

    def tokenized(texts: list[str], **options: Any) -> tuple[list[Any], list[Any]]:
        if not texts:
            return [], []

        options[argument] = texts
        output = tokenizer(return_special_tokens_mask=True, verbose=False, **options)
        return output["input_ids"], output["special_tokens_mask"]

    texts = _without_frame(tokenizer, texts)
    ids, special = tokenized(texts)
    is_cut = are_longer(ids, length)

    too_long = np.flatnonzero(is_cut).tolist()
    their_texts = [texts[number] for number in too_long]
    cut_ids, cut_special = tokenized(their_texts, truncation=True, max_length=length)
    for place, number in enumerate(too_long):
        ids[number] = cut_ids[place]
        special[number] = cut_special[place]

    return ids, special, is_cut


def _without_frame(tokenizer: Any, texts: list[str]) -> list[str]:
    """Texts without the tokens at their ends that the tokenizer will put there itself."""
    frame = tokenizer("", verbose=False)["input_ids"]
    if not frame:
        return texts

    first = frame[0]
    if first in (tokenizer.bos_token_id, tokenizer.cls_token_id):
        beginning = tokenizer.convert_ids_to_tokens(first)
        texts = [text.removeprefix(beginning) for text in texts]

    last = frame[-1]
    if last in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        end = tokenizer.convert_ids_to_tokens(last)
        texts = [text.removesuffix(end) for text in texts]

    return texts


def are_longer(rows: list[Any], length: int | None) -> list[bool]:
    """Which rows are longer than a length; None: none is."""
    return [length is not None and len(row) > length for row in rows]
