"""The processor beside a model's weights: makes arguments of its forward from images or sound, and
texts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

# What says how a processor works, beside the files of its tokenizer.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Processing:
    """What makes a model's batches of images or sound.

    Attributes:
        processor: or the feature extractor.
        arguments: of the model's forward; what else a processor makes is left out.
        start: the token that the model itself puts before the labels.
        samples_a_label: how many samples of a wave each label needs, where a loss aligns them.
    """

    processor: Any
    arguments: frozenset[str] = frozenset()
    start: int | None = None
    samples_a_label: int | None = None


def load_processor(folder: str | Path, kind: str) -> Any:
    """The processor in a directory or under a hub id; code that comes with it is never run.

    Args:
        kind: the model_type.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        found = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ImportError:
        if kind not in PROCESSOR_MAPPING_NAMES:
            raise
    else:  # it may be a tokenizer, where no file names the processor
        if isinstance(found, transformers.ProcessorMixin) or kind not in PROCESSOR_MAPPING_NAMES:
            return found

    return _without_video(folder, PROCESSOR_MAPPING_NAMES[kind])


def load_extractor(folder: str | Path) -> Any:
    """The feature extractor of sound in a directory or under a hub id."""
    return transformers.AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False)


class _NoVideo:
    """Lets a processor have no video processor."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return argument and super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]


def _without_video(folder: str | Path, name: str) -> Any:
    """The processor of that class from its parts without the one for videos, which needs
    torchvision."""
    # The one that transformers itself offers needs torchvision, too.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    kinds: dict[str, Any] = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    made: Any = type(name, (_NoVideo, getattr(transformers, name)), {})
    parts = []
    for part in made.get_attributes():
        kind = kinds.get(part)
        loaded = None if kind is None else kind.from_pretrained(folder, trust_remote_code=False)
        parts.append(loaded)

    return made.from_args_and_dict(parts, made.get_processor_dict(folder)[0])
