"""What another tool is run on where only its memory and speed matter: a model with random weights, a
tokenizer of bytes, and rows of the worst length."""

import contextlib
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from autofit.core.errors import InputError
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.export.runs.run import Stage
from autofit.models.huggingface import HuggingFaceModel
from autofit.training import random_state

_END = "<0x03>"  # ASCII's end of text


def end_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The tokenizer of bytes, with a token that ends a text."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False  # tools write the end of a text as text
    tokenizer.init_kwargs["split_special_tokens"] = False
    tokenizer.add_special_tokens({"eos_token": _END})
    return tokenizer


def check_vocabulary(model: HuggingFaceModel) -> None:
    """Raise an InputError where a model has too few tokens for that tokenizer."""
    needed = len(end_tokenizer())
    tokens = model.transformers_config().get_text_config().vocab_size
    if tokens < needed:
        message = f"{model.name} has {tokens} tokens, and rows for a tool need {needed}."
        raise InputError(message, "Leave the verification out.")


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without the progress bars of a library."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


def save_random_model(model: HuggingFaceModel, folder: Path) -> None:
    """Save random weights of a model, in the dtype that its config names, with that tokenizer."""
    config = transformers.CONFIG_MAPPING[model.config["model_type"]].from_dict(dict(model.config))
    vars(config).pop("quantization_config", None)
    auto = getattr(transformers, model.auto_class())
    with random_state.preserved():
        torch.manual_seed(0)
        made = auto.from_config(config, dtype=config.dtype or torch.float32)
    with _quiet(transformers.utils.logging):
        made.save_pretrained(folder)
    end_tokenizer().save_pretrained(folder)


def save_tokens(texts: tuple[str, ...], folder: Path) -> None:
    """Save texts as token ids, each with the token that ends it; every token is learnt."""
    tokenizer: Any = end_tokenizer()
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    with _quiet(datasets.utils.logging):
        datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).save_to_disk(folder)


def long_texts(samples: int, tokens: int) -> tuple[str, ...]:
    """Texts of so many tokens with the one that ends each, of which no two begin alike."""
    letters = string.ascii_lowercase
    texts = []
    for row in range(samples):
        begin = row % len(letters)
        turns = letters[begin:] + letters[:begin]
        texts.append((turns * (tokens // len(letters) + 1))[: tokens - 1])
    return tuple(texts)


def staged(
    model: HuggingFaceModel, folder: Path, *, name: str, samples: int, tokens: int, steps: int
) -> Stage:
    """Save all that a tool is run on.

    Args:
        name: of the weights' folder, which some tools tell the kind of a model by.
        samples: of one optimizer step.
        tokens: of a sample.
        steps: that the tool trains.
    """
    run = folder / "run"
    run.mkdir(parents=True)
    stage = Stage(
        folder=run,
        weights=folder / (name or "model"),
        texts=long_texts(samples, tokens),
        tokens=folder / "tokens",
        steps=steps,
    )
    save_random_model(model, stage.weights)
    save_tokens(stage.texts, stage.tokens)
    return stage
