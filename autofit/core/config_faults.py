"""Errors that come from the config of a transformers model: named by the field, its value and the remedy.

They are raised by a line of transformers or PyTorch, which is not where anybody could correct them. What the code had
in its hands is read from the frames that the error went through; nothing here needs torch.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import AutofitError, InputError, message_of, sentence, shown
from autofit.core.task import Task
from autofit.core.tasks import task_of
from autofit.core.tasks.custom import CUSTOM

_RAISED = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
_BATCH = ("input_ids", "labels", "token_type_ids", "pixel_values", "attention_mask")
_WHERE_MADE = "Correct it where the model is made, or in its config.json."

Fault = tuple[str, str]  # what is wrong, and what to do


@contextmanager
def config_faults_named() -> Iterator[None]:
    """Turn an error of a model inside that comes from its config into an InputError; all others pass."""
    try:
        yield
    except _RAISED as error:
        found = None if isinstance(error, AutofitError) else config_fault(error)
        if found is None:
            raise
        raise InputError(*found) from error


def config_fault(error: BaseException) -> Fault | None:
    """What is wrong with the config of the model that raised an error, or beside it with the batch; None where that is
    not known."""
    seen = _seen(error)
    if seen is None:
        return None
    for rule in _RULES:
        # a config of somebody else's, or tensors of a device that has failed
        with suppress(Exception):
            if found := rule(seen):
                return found
    return None


@dataclass(frozen=True)
class _Seen:
    """What the code that raised an error had in its hands."""

    error: BaseException
    message: str
    config: Any
    task: Task
    batch: dict[str, Any]  # the model's arguments

    def value(self, field: str) -> Any:
        """Of the config, or of that of its text."""
        get_text_config = getattr(self.config, "get_text_config", None)
        text = get_text_config() if callable(get_text_config) else self.config
        return getattr(self.config, field, getattr(text, field, None))

    def own(self, field: str) -> str:
        """What this kind of config calls a field: GPT-2's hidden_size is n_embd."""
        return str((getattr(self.config, "attribute_map", None) or {}).get(field, field))

    def named(self, field: str) -> str:
        """A field with its value, for a sentence."""
        value = shown(self.value(field))
        return f"{self.own(field)} of the model's config ({type(self.config).__name__}) is {value}"

    def largest(self, name: str) -> int:
        """The largest number in a tensor of the batch; -1 without it."""
        tensor = self.batch.get(name)
        return -1 if tensor is None or tensor.is_floating_point() else int(tensor.max())


def _seen(error: BaseException) -> _Seen | None:
    config: Any = None
    task = CUSTOM
    batch: dict[str, Any] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):  # from the outermost one
        values = frame.f_locals
        owner = values.get("self")
        for found in (getattr(owner, "config", None), values.get("config"), owner):
            if hasattr(found, "model_type") and hasattr(found, "to_dict"):
                config = found
                break
        task = task if task is not CUSTOM else task_of(owner)
        for name in _BATCH:
            if name not in batch and hasattr(values.get(name), "shape"):
                batch[name] = values[name]
    return None if config is None else _Seen(error, message_of(error), config, task, batch)


def _unknown_token(seen: _Seen) -> Fault | None:
    vocabulary = seen.value("vocab_size")
    if not isinstance(seen.error, IndexError) or not isinstance(vocabulary, int):
        return None
    remedy = "Give the tokenizer of this model, or call model.resize_token_embeddings."
    names = ["input_ids"] if seen.task.classifies else ["input_ids", "labels"]
    for name in names:
        if seen.largest(name) >= vocabulary:
            ids = f"{name} of the batch go up to {seen.largest(name)}"
            return f"{seen.named('vocab_size')}, and {ids}.", remedy
    return None


def _unknown_class(seen: _Seen) -> Fault | None:
    classes, largest = seen.value("num_labels"), seen.largest("labels")
    is_classified = isinstance(seen.error, IndexError) and seen.task.classifies
    if not is_classified or not isinstance(classes, int) or largest < classes:
        return None
    message = f"{seen.named('num_labels')}, and labels of the batch go up to {largest}."
    return message, f"Make the model with num_labels={largest + 1}."


def _unknown_type(seen: _Seen) -> Fault | None:
    types, largest = seen.value("type_vocab_size"), seen.largest("token_type_ids")
    if not isinstance(seen.error, IndexError) or not isinstance(types, int) or largest < types:
        return None
    message = (
        f"{seen.named('type_vocab_size')}, and token_type_ids of the batch go up to {largest}."
    )
    return message, "Leave them out, or number them from 0."


def _too_long(seen: _Seen) -> Fault | None:
    most, ids = seen.value("max_position_embeddings"), seen.batch.get("input_ids")
    if (
        not isinstance(seen.error, IndexError)
        or not isinstance(most, int)
        or ids is None
        or ids.shape[-1] <= most
    ):
        return None
    message = f"{seen.named('max_position_embeddings')}, and samples of the batch have {ids.shape[-1]} tokens."
    return message, f"Cut them to {most} tokens."


def _padding(seen: _Seen) -> Fault | None:
    if "padding" not in seen.message.lower():
        return None
    token, vocabulary = seen.value("pad_token_id"), seen.value("vocab_size")
    if token is None:
        message = f"{seen.named('pad_token_id')}: the model cannot tell where a sample ends."
        return message, "Set model.config.pad_token_id to the padding token of the tokenizer."
    if isinstance(vocabulary, int) and not -vocabulary <= token < vocabulary:
        message = (
            f"{seen.named('pad_token_id')}, and vocab_size is {vocabulary}: there is no such token."
        )
        return message, "Set pad_token_id to a token of the vocabulary, or to None."
    return None


def _heads(seen: _Seen) -> Fault | None:
    width, heads = seen.value("hidden_size"), seen.value("num_attention_heads")
    if (
        "heads" not in seen.message
        or not isinstance(width, int)
        or not isinstance(heads, int)
        or not width % heads
    ):
        return None
    return (
        f"{seen.named('hidden_size')}, which {seen.own('num_attention_heads')} {heads} does not divide.",
        _WHERE_MADE,
    )


def _image(seen: _Seen) -> Fault | None:
    pixels = seen.batch.get("pixel_values")
    if not isinstance(seen.error, ValueError) or pixels is None or len(pixels.shape) != 4:
        return None
    channels, height, width = (int(size) for size in pixels.shape[1:])
    if "channel" in seen.message and seen.value("num_channels") not in (None, channels):
        message = f"{seen.named('num_channels')}, and pixel_values of the batch have {channels}."
        return message, "Give images of as many channels."
    if "image size" in seen.message and seen.value("image_size") not in (
        None,
        height,
        [height, width],
    ):
        message = (
            f"{seen.named('image_size')}, and pixel_values of the batch are {height} x {width}."
        )
        return message, "Resize the images, or make the model with that image_size."
    return None


def _problem(seen: _Seen) -> Fault | None:
    labels = seen.batch.get("labels")
    several = seen.value("problem_type") == "multi_label_classification"
    if not several or labels is None or tuple(labels.shape[1:]) == (seen.value("num_labels"),):
        return None
    message = f"{seen.named('problem_type')}, and labels of the batch have the shape {tuple(labels.shape)}."
    return (
        message,
        "Give a number for each class, or set problem_type to single_label_classification.",
    )


def _missing(seen: _Seen) -> Fault | None:
    kind = type(seen.config).__name__
    found = re.search(rf"'{kind}' object has no attribute '(\w+)'", seen.message)
    if not isinstance(seen.error, AttributeError) or found is None:
        return None
    return (
        f"the model's config ({kind}) has no {found[1]}, which the model needs.",
        f"Set model.config.{found[1]}.",
    )


def _unknown_name(seen: _Seen) -> Fault | None:
    """A key that is missed in a table: what a field of the config names, for example an activation."""
    if (
        not isinstance(seen.error, KeyError)
        or not seen.error.args
        or not isinstance(seen.error.args[0], str)
    ):
        return None
    fields = [field for field, value in vars(seen.config).items() if value == seen.error.args[0]]
    return (
        (f"{seen.named(fields[0])}, which transformers does not know.", _WHERE_MADE)
        if fields
        else None
    )


def _told(seen: _Seen) -> Fault | None:
    """A field that the error's own message tells of, as one of the config."""
    if "config" not in seen.message.lower():
        return None
    fields = [
        field for field in vars(seen.config) if re.search(rf"\b{re.escape(field)}\b", seen.message)
    ]
    if not fields or "_" not in fields[0]:  # other words are those of any message
        return None
    return f"{seen.named(fields[0])}: {sentence(seen.error)}.", f"Set model.config.{fields[0]}."


_RULES: tuple[Callable[[_Seen], Fault | None], ...] = (
    *(_unknown_token, _unknown_class, _unknown_type, _too_long, _padding, _heads, _image, _problem),
    *(_missing, _unknown_name, _told),
)
