"""FileReader: a model's own tokenizer or processor, classes and normalisation, with which data
files become batches."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from autofit.core.errors import InputError, reported, sentence
from autofit.core.events import Listener, Note
from autofit.core.files import read_text
from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.file_loader import PROCESSED, file_loader
from autofit.data.options import DataOptions, LabelRule, Normalisation
from autofit.data.processors import (
    CHAT_TEMPLATE_FILES,
    PROCESSOR_FILES,
    Processing,
    load_extractor,
    load_processor,
)
from autofit.data.samples import FileLoader
from autofit.data.sound import SOUND
from autofit.models import HuggingFaceModel


@dataclass
class FileReader:
    """Reads data files for one model: with its tokenizer or processor, its classes, its images'
    normalisation."""

    workload: Workload
    factory: HuggingFaceModel
    weights: str | Path | None
    trusted: bool  # whether the tokenizer may run code of its own
    options: DataOptions
    listener: Listener

    def __post_init__(self) -> None:
        source = self.factory.source
        folders = (self.weights, source.get("path") if source.get("kind") == "directory" else None)
        self.folders = [folder for folder in folders if folder is not None]  # the first before the next
        task = self.workload.task
        self.processing = self._processing() if task in PROCESSED else None
        self.tokenizer: Any = getattr(self.processing and self.processing.processor, "tokenizer", None)
        if self.tokenizer is None and task not in ("image-classification", "audio-classification"):
            self.tokenizer = self._tokenizer()

    def loader(self, path: Path, *, names: Mapping[str, int] | None = None) -> FileLoader:
        """The loader of a file; `names` are the classes of the training data, to which evaluation
        data keeps."""
        normalisation = self._normalisation() if self.tokenizer is None else Normalisation()
        options = dataclasses.replace(self.options, labels=self._labels(names), normalisation=normalisation)
        given: Any = {"tokenizer": self.tokenizer, "processing": self.processing}
        loader = file_loader(self.workload, path, options=options, **given)
        for note in loader.notes:
            self.listener(Note(note))
        if self.tokenizer is not None:  # an id beyond the vocabulary would end the first step with an index error
            largest = max(loader.samples.largest_id(), loader.mask_id or 0)
            vocabulary = int(self.factory.transformers_config().get_text_config().vocab_size)
            if largest >= vocabulary:
                message = f"the data has token ids up to {largest}, but {self.factory.name} knows {vocabulary} tokens."
                raise InputError(message, "Give --weights with the tokenizer of this model beside them.")
        return loader

    def _labels(self, names: Mapping[str, int] | None) -> LabelRule:
        config = self.factory.transformers_config()
        if not self.factory.task.endswith("classification"):
            return LabelRule()
        if config.num_labels > 1 and config.problem_type not in (None, "single_label_classification"):
            message = f"{self.factory.name} takes several labels for each sample, which data files here do not have."
            raise InputError(message, "Train it in Python: autofit.fit(model, loader, config=...).")
        own = {name: int(number) for number, name in config.id2label.items()}
        return LabelRule(int(config.num_labels), own if names is None else names, strict=names is not None)

    def _tokenizer(self) -> Any:
        """The tokenizer beside the weights or, for a directory, beside the model's config; else one
        of bytes."""
        for folder in self.folders:
            if any(_beside(folder, f"tokenizer{end}.json") for end in ("_config", "")):
                with blaming("tokenizer", folder):
                    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trusted)
        self.listener(Note("no tokenizer beside the weights: the bytes of the text are its token ids."))
        return byte_tokenizer()

    def _processing(self) -> Processing:
        """The processor beside the weights or, for a directory, beside the model's config."""
        config, task = self.factory.transformers_config(), self.workload.task
        for folder in self.folders:
            if any(_beside(folder, name) for name in PROCESSOR_FILES):
                with blaming("processor", folder):
                    found = load_extractor(folder) if task in SOUND else load_processor(folder, config.model_type)
                if task in SOUND or hasattr(found, "tokenizer"):
                    start = getattr(config, "decoder_start_token_id", None)
                    ratio = getattr(config, "inputs_to_logits_ratio", None) if task == "ctc" else None
                    return Processing(found, frozenset(self.factory.arguments()), start, ratio)
        message = f"{self.factory.name} is trained on what its own processor makes of a file, and none is there."
        remedy = f"Give --weights with {' or '.join(PROCESSOR_FILES[:2])} and the tokenizer beside them."
        raise InputError(message, remedy)

    def save(self, folder: Path) -> None:
        """Leave the tokenizer beside a trained model, and what says how its processor works."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.processing is None and self.tokenizer is not None:
            return
        for name in (*PROCESSOR_FILES, *CHAT_TEMPLATE_FILES):
            found = next((file for each in self.folders if (file := _beside(each, name))), None)
            if found and found.resolve() != (folder / name).resolve():
                shutil.copyfile(found, folder / name)

    def _normalisation(self) -> Normalisation:
        """What the weights were trained with; where nothing says it, half and half, as for ViT."""
        name, default = "preprocessor_config.json", Normalisation()
        if self.weights is None or (file := _beside(self.weights, name)) is None:
            return default
        with blaming(name, self.weights):
            settings = json.loads(read_text(file))
            if not settings.get("do_normalize", True):
                return Normalisation((0.0,), (1.0,))
            given = settings.get("image_mean", default.mean), settings.get("image_std", default.deviation)
            return Normalisation(*(tuple(map(float, values)) for values in given))


def _beside(weights: str | Path, name: str) -> Path | None:
    """A file in a directory of weights or under a hub id; None where there is none."""
    found = transformers.utils.cached_file(
        str(weights), name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def blaming(part: str, weights: str | Path) -> AbstractContextManager[None]:
    """An InputError for what fails while a part is loaded from beside the weights."""
    remedy = "Give a directory that save_pretrained of this model wrote."
    return reported(lambda error: f"the {part} in {weights} cannot be loaded: {sentence(error)}.", remedy)
