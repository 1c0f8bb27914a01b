"""Hugging Face models as workloads: the model factory, and the batch factory that fits it.

transformers and torch are imported where a config or a model is made, so that importing this file, and with it the CLI,
stays cheap.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError, is_whole, require, sentence, shown
from autofit.core.workload import Workload
from autofit.models.synthetic import ClassLabels, RandomImages, RandomTokens

if TYPE_CHECKING:
    from torch import nn

SEQUENCE_LENGTH = 2048  # unless given, or the model's maximum is shorter
EFFECTIVE_BATCH_SIZE = 32
IMAGE_SIZE = 224  # of convolutional networks, whose config.json names none

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}

# RoBERTa and its children number positions from pad_token_id + 1, and have that many positions fewer than embeddings.
OFFSET_POSITIONS = (
    *("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


@dataclass(frozen=True)
class HuggingFaceModel:
    """() -> the model with random float32 weights: a task and a config.json, held as plain data that can be pickled.

    `source` says where the config came from; code that comes with a checkpoint is fetched from there, and only when
    `trust_remote_code` allows it.
    """

    name: str
    task: str
    config: Mapping[str, Any]
    source: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __call__(self) -> "nn.Module":
        """Build the model on the current default device. Raises InputError: the config describes no model that can be
        built."""
        import torch
        import transformers

        config = self.transformers_config()
        vars(config).pop("quantization_config", None)  # of the checkpoint's weights, not of those made here
        auto = getattr(transformers, AUTO_CLASSES[self.task])
        try:
            # float32 whatever config.json says: what holds the weights is decided by the precision that is searched.
            model: nn.Module = auto.from_config(config, dtype=torch.float32, trust_remote_code=self.trust_remote_code)
        except (ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
            # Not RuntimeError: running out of memory is one, and is no fault of the config.
            raise InputError(f"{self.name} cannot be built from its config: {sentence(error)}.") from error
        return model

    def longest(self) -> int | None:
        """The most tokens that a sample can have; None where the config sets no limit."""
        return _positions(self.transformers_config().get_text_config())

    def transformers_config(self) -> Any:
        """The config as transformers' own object, set for training."""
        from transformers import CONFIG_MAPPING, AutoConfig

        if self.trust_remote_code and "auto_map" in self.config:
            # From the cache: it was fetched when the model was resolved, and a probe must not wait for a network.
            origin = self.source.get("path") or self.source["model"]
            config = AutoConfig.from_pretrained(origin, trust_remote_code=True, local_files_only=True)
        else:
            # A copy, because transformers completes nested mappings in place.
            config = CONFIG_MAPPING[self.config["model_type"]].from_dict(copy.deepcopy(dict(self.config)))
        text = config.get_text_config()
        text.use_cache = False  # the keys and values that a generation would reuse
        if self.task == "sequence-classification" and _padding(text) is None:
            text.pad_token_id = 0  # decoders find the last token of each sample by it, and refuse batches without
        return config


def huggingface_workload(
    model: HuggingFaceModel, *, sequence_length: int | None = None, effective_batch_size: int | None = None
) -> Workload:
    """The workload of training that model on random data of the largest shape. Raises InputError: a sequence length the
    model cannot have, or a config without what the data is made from."""
    config = model.transformers_config()
    batch: RandomImages | RandomTokens
    if model.task == "image-classification":
        if sequence_length is not None:
            message = f"{model.name} is trained on images, which have no sequence length."
            raise InputError(message, "Leave the sequence length out.")
        vision = getattr(config, "vision_config", config)  # of models of images and text
        size = getattr(vision, "image_size", None) or IMAGE_SIZE
        sides = [size, size] if isinstance(size, int) else size
        if not isinstance(sides, list | tuple) or len(sides) != 2 or any(type(n) is not int or n < 1 for n in sides):
            message = f"the config of {model.name} cannot have image_size {shown(size)}."
            raise InputError(message, "Correct config.json.")
        height, width = sides
        batch = RandomImages(_size(vision, "num_channels", model.name), height, width, _class_labels(config))
    else:
        text = config.get_text_config()
        vocabulary, padding = _size(text, "vocab_size", model.name), _padding(text)
        batch = RandomTokens(
            task=model.task,
            sequence_length=_sequence_length(model, sequence_length, _positions(text)),
            vocab_size=vocabulary,
            pad_token_id=padding if padding is not None and padding < vocabulary else None,
            labels=_class_labels(config) if model.task == "sequence-classification" else None,
        )
    length = batch.sequence_length if isinstance(batch, RandomTokens) else None
    return Workload(
        model=model,
        batch=batch,
        effective_batch_size=EFFECTIVE_BATCH_SIZE if effective_batch_size is None else effective_batch_size,
        unit="samples" if length is None else "tokens",
        sequence_length=length,
        task=model.task,
        name=model.name,
        source=dict(model.source),
    )


def _class_labels(config: Any) -> ClassLabels:
    """The kind of labels that transformers' loss expects, by its own rule for configs that do not say."""
    default = "regression" if config.num_labels == 1 else "single_label_classification"
    return ClassLabels(config.num_labels, config.problem_type or default)


def _sequence_length(model: HuggingFaceModel, given: int | None, maximum: int | None) -> int:
    shortest = 2 if model.task == "causal-lm" else 1  # the first token of a sample is never predicted
    if given is None:
        return SEQUENCE_LENGTH if maximum is None else min(SEQUENCE_LENGTH, maximum)
    rule = f"the sequence length must be a whole number of at least {shortest}"
    require(is_whole(given, shortest), rule, given, "For example 2048.")
    if maximum is not None and given > maximum:
        message = f"{model.name} takes sequences of at most {maximum} tokens, not {shown(given)}."
        raise InputError(message, f"Give {maximum} or less.")
    return given


def _positions(text: Any) -> int | None:
    """The longest sequence the config allows; None where it sets no limit."""
    maximum = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not isinstance(maximum, int) or maximum < 1:
        return None
    padding = _padding(text)
    offset = padding + 1 if text.model_type in OFFSET_POSITIONS and padding is not None else 0
    return maximum - offset


def _padding(text: Any) -> int | None:
    """The padding token; None also where foreign code has no such key, or -1 for none."""
    padding = getattr(text, "pad_token_id", None)
    return padding if isinstance(padding, int) and padding >= 0 else None


def _size(config: Any, key: str, name: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"the config of {name} needs a positive {key}, not {value!r}.", "Correct config.json.")
    return value
