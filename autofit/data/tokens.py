"""Rows become token ids and, where not every token is learnt, labels: one Encoder per form of the data.

Done by the tokenizer in batches through `Dataset.map` of the datasets library, which shows the progress and keeps the
outcome in its cache, so that a second run on the same data starts at once.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher

from autofit.core.errors import InputError
from autofit.data.batch import IGNORED_LABEL
from autofit.data.byte_tokenizer import byte_ids, is_byte_tokenizer
from autofit.data.rows import COMPLETION, LABELLED, MESSAGES, Form, Rows

Ids = list[int]
_FEATURES = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("int32")),
    "cut": datasets.Value("bool"),
}


@dataclass(frozen=True)
class Encoding:
    """How rows become samples.

    Args:
        length: cut every row to it; None where rows are put one after the other.
        masked: some tokens will be hidden, so the tokenizer's own frame ([CLS] ... [SEP]) is put around a text.
    """

    tokenizer: Any
    length: int | None
    masked: bool = False


def encode(rows: Rows, encoding: Encoding, *, progress: bool) -> datasets.Dataset:
    """A data set with `input_ids`, `labels` (empty where they are the ids) and whether a row was `cut`.

    Raises:
        InputError: a chat template that does not take the messages, or a cache that cannot be written.
    """
    return cached_map(
        {**{name: rows.columns[name] for name in rows.form if name != "label"}, "place": rows.places},
        encoder(rows.form, encoding),
        features=_FEATURES,
        key=(rows.form, encoding),
        progress="Tokenising" if progress else None,
    )


def cached_map(
    columns: Mapping[str, Any],
    function: Callable[[dict[str, list[Any]]], dict[str, list[Any]]],
    *,
    features: Mapping[str, Any],
    key: Any,
    progress: str | None,
) -> datasets.Dataset:
    """`function` on batches of the columns, taken from the cache of the datasets library when it is there.

    Args:
        key: what the outcome depends on beside the columns and the code of the module that `function` is of.
        progress: what the bar on stderr says; None for no bar.

    Raises:
        InputError: the cache cannot be written.
    """
    data = datasets.Dataset.from_dict(dict(columns))
    code = inspect.getsource(sys.modules[function.__module__])
    fingerprint = Hasher.hash((data._fingerprint, code, key))
    directory = Path(datasets.config.HF_DATASETS_CACHE) / "autofit"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _progress_bars(progress is not None):
            return data.map(
                function,
                batched=True,
                remove_columns=data.column_names,
                features=datasets.Features(features),
                cache_file_name=str(directory / f"{fingerprint}.arrow"),
                new_fingerprint=fingerprint,
                desc=progress,
            )
    except OSError as error:
        message = f"the cache in {directory} cannot be written: {error}."
        raise InputError(message, "Make room there, or set HF_DATASETS_CACHE to another directory.") from error


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide the bars of the datasets library, whose switch is one for the whole process and belongs to its user."""
    if shown or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def marks_assistant_turns(tokenizer: Any) -> bool:
    """Whether the chat template says which tokens the assistant wrote (`{% generation %}`)."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


def encoder(form: Form, encoding: Encoding) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    """The function that makes samples of a batch of rows of this form."""
    if form == COMPLETION:
        return _Completions(encoding)
    if form == MESSAGES:
        return _Chats(encoding)
    framed = form == LABELLED or (encoding.masked and encoding.length is not None)
    return _Framed(encoding) if framed else _Texts(encoding)


@dataclass(frozen=True)
class _Texts:
    """Plain text with the end of text after it, and before it what the tokenizer begins with when it stands alone."""

    encoding: Encoding

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        tokenizer, length = self.encoding.tokenizer, self.encoding.length
        start, end = _start(tokenizer)[: 0 if length is None else None], _end(tokenizer)
        ids = [np.concatenate([start, each, end]) for each in _plain_ids(tokenizer, rows["text"])]
        return _cut(ids, None, length)


@dataclass(frozen=True)
class _Completions:
    """A prompt, which is not learnt, and its completion with the end of text, which is."""

    encoding: Encoding

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        tokenizer, length = self.encoding.tokenizer, self.encoding.length
        start, end = _start(tokenizer), _end(tokenizer)
        prompts = [np.concatenate([start, each]) for each in _plain_ids(tokenizer, rows["prompt"])]
        completions = [np.concatenate([each, end]) for each in _plain_ids(tokenizer, rows["completion"])]
        pairs = list(zip(prompts, completions, strict=True))
        ids = [np.concatenate(pair) for pair in pairs]
        labels = [np.concatenate([np.full(len(prompt), IGNORED_LABEL), completion]) for prompt, completion in pairs]
        return _cut(ids, labels, length)


@dataclass(frozen=True)
class _Chats:
    """Messages as the chat template writes them; the assistant's turns are learnt where the template marks them."""

    encoding: Encoding

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        marked = marks_assistant_turns(self.encoding.tokenizer)
        ids, labels = [], []
        for messages, place in zip(rows["messages"], rows["place"], strict=True):
            told = self._told(json.loads(messages), place, marked)
            ids.append(np.array(told["input_ids"]))
            mask = np.array(told["assistant_masks"] if marked else [1] * len(ids[-1]), bool)
            labels.append(np.where(mask, ids[-1], IGNORED_LABEL))
        return _cut(ids, labels, self.encoding.length)

    def _told(self, messages: Any, place: str, marked: bool) -> Mapping[str, Ids]:
        try:
            told: Mapping[str, Ids] = self.encoding.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
            )
        except Exception as error:  # a template is code that came with the tokenizer
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            message = f"{place}: the tokenizer's chat template does not take these messages: {reason}."
            raise InputError(message, "Correct the messages.") from error
        return told


@dataclass(frozen=True)
class _Framed:
    """Text within the tokens that the tokenizer puts around it, which are never guessed."""

    encoding: Encoding

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        # A sample of no tokens has no class.
        whole = self._called([text or " " for text in rows["text"]])
        length = self.encoding.length or 0
        cut = [len(ids) > length for ids in whole["input_ids"]]
        shorter = self._called([text for text, long in zip(rows["text"], cut, strict=True) if long], length)
        ids, special = (_replaced(whole[name], cut, shorter[name]) for name in ("input_ids", "special_tokens_mask"))
        if not self.encoding.masked:
            return {"input_ids": ids, "labels": [[] for _ in ids], "cut": cut}
        pairs = zip(ids, special, strict=True)
        labels = [np.where(np.array(mask, bool), IGNORED_LABEL, each) for each, mask in pairs]
        return {"input_ids": ids, "labels": labels, "cut": cut}

    def _called(self, texts: list[str], length: int | None = None) -> Mapping[str, list[Ids]]:
        if not texts:
            return {"input_ids": [], "special_tokens_mask": []}
        options: dict[str, Any] = {} if length is None else {"truncation": True, "max_length": length}
        called: Mapping[str, list[Ids]] = self.encoding.tokenizer(
            texts, return_special_tokens_mask=True, verbose=False, **options
        )
        return called


def _replaced(items: list[Ids], where: list[bool], others: list[Ids]) -> list[Ids]:
    """The items, with the next of `others` in place of those marked."""
    waiting = iter(others)
    return [next(waiting) if marked else item for item, marked in zip(items, where, strict=True)]


def _plain_ids(tokenizer: Any, texts: list[str]) -> list[Any]:
    """The ids of texts without anything around them."""
    if is_byte_tokenizer(tokenizer):
        return [byte_ids(text) for text in texts]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [np.array(ids, np.int32) for ids in encoded["input_ids"]]


def _start(tokenizer: Any) -> Any:
    """The token that the tokenizer itself begins every text with, if it does."""
    first = tokenizer("", verbose=False)["input_ids"][:1]
    return np.array([each for each in first if each == tokenizer.bos_token_id], np.int32)


def _end(tokenizer: Any) -> Any:
    """The end of text, if there is one."""
    return np.array([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], np.int32)


def _cut(ids: list[Any], labels: list[Any] | None, length: int | None) -> dict[str, list[Any]]:
    return {
        "input_ids": [each[:length].astype(np.int32) for each in ids],
        "labels": [each[:length].astype(np.int32) for each in labels] if labels else [[] for _ in ids],
        "cut": [length is not None and len(each) > length for each in ids],
    }
