"""FileReader: makes batches of data files with a model's own tokenizer, processor and classes."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from autofit.core.errors import InputError, as_input_error, describe_error, sentence
from autofit.core.events import Listener, Note
from autofit.core.files import read_text
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.file_loader import file_loader
from autofit.data.options import DataOptions, LabelRule, Normalisation
from autofit.data.processors import (
    CHAT_TEMPLATE_FILES,
    PROCESSOR_FILES,
    Processing,
    load_extractor,
    load_processor,
)
from autofit.data.samples import FileLoader
from autofit.models import HuggingFaceModel
from autofit.training.atomic_writes import atomic_files


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
        self.folders = []  # to look for files in, the first before the next
        if self.weights is not None:
            self.folders.append(self.weights)
        if source.get("kind") == "directory":
            self.folders.append(source["path"])

        self.task = TASKS[self.workload.task]
        is_processed = self.task.medium in ("sound", "images and text")
        self.processing = self._processing() if is_processed else None
        processor = self.processing and self.processing.processor
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        if self.tokenizer is None and (self.task.reads_text or not self.task.classifies):
            self.tokenizer = self._tokenizer()

    def loader(self, path: Path, *, names: Mapping[str, int] | None = None) -> FileLoader:
        """The loader of a file.

        Args:
            names: the classes of the training data, which evaluation data keeps to.
        """
        normalisation = Normalisation()
        if self.tokenizer is None:
            normalisation = self._normalisation()
        loader = file_loader(
            self.workload,
            path,
            tokenizer=self.tokenizer,
            processing=self.processing,
            options=dataclasses.replace(
                self.options,
                labels=self._labels(names),
                normalisation=normalisation,
            ),
        )
        for note in loader.notes:
            self.listener(Note(note))
        if self.tokenizer is None:
            return loader

        # An id beyond the vocabulary would end the first step with an index error.
        largest = max(loader.samples.largest_id(), loader.mask_id or 0)
        config = self.factory.transformers_config().get_text_config()
        if largest >= config.vocab_size:
            known = f"{self.factory.name} knows {config.vocab_size} tokens"
            message = f"the data has token ids up to {largest}, but {known}."
            remedy = "Give --weights with the tokenizer of this model beside them."
            raise InputError(message, remedy)
        return loader

    def save(self, folder: Path) -> None:
        """Leave the tokenizer beside a trained model, and what says how its processor works.

        Raises InputError where they cannot be written; files that are there stay whole.
        """
        failure = "what reads its texts cannot be saved beside the model"
        remedy = "Make room there, and run the same command with --resume: all training is kept."
        with (
            as_input_error(lambda error: f"{failure}: {describe_error(error)}.", remedy),
            atomic_files(folder, what="the tokenizer", needed_bytes=0) as part,
        ):
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(part)
            if self.tokenizer is None or self.processing is not None:
                self._copy_processor(part, folder)

    def _copy_processor(self, part: Path, folder: Path) -> None:
        for name in (*PROCESSOR_FILES, *CHAT_TEMPLATE_FILES):
            for source in self.folders:
                file = _beside(source, name)
                if file is not None:
                    if file.resolve() != (folder / name).resolve():
                        shutil.copyfile(file, part / name)
                    break

    def _labels(self, names: Mapping[str, int] | None) -> LabelRule:
        config = self.factory.transformers_config()
        if self.task.scores:
            return LabelRule(1)
        if not self.task.classifies:
            return LabelRule()

        classes = int(config.num_labels)
        if classes > 1 and config.problem_type not in (None, "single_label_classification"):
            message = f"{self.factory.name} takes several labels for each sample, "
            message += "which data files here do not have."
            remedy = "Train it in Python: autofit.fit(model, loader, config=...)."
            raise InputError(message, remedy)

        if names is not None:
            return LabelRule(classes, names, strict=True)
        own = {name: int(number) for number, name in config.id2label.items()}
        return LabelRule(classes, own)

    def _tokenizer(self) -> Any:
        """The tokenizer beside the weights or, for a directory, beside the model's config; else one
        of bytes."""
        for folder in self.folders:
            if _beside(folder, "tokenizer_config.json") or _beside(folder, "tokenizer.json"):
                with blaming("tokenizer", folder):
                    return transformers.AutoTokenizer.from_pretrained(
                        folder,
                        trust_remote_code=self.trusted,
                    )

        note = "no tokenizer beside the weights: the bytes of the text are its token ids."
        self.listener(Note(note))
        return byte_tokenizer()

    def _processing(self) -> Processing:
        """The processor beside the weights or, for a directory, beside the model's config."""
        config = self.factory.transformers_config()
        is_sound = self.task.medium == "sound"
        for folder in self.folders:
            if not any(_beside(folder, name) for name in PROCESSOR_FILES):
                continue
            with blaming("processor", folder):
                kind = config.model_type
                found = load_extractor(folder) if is_sound else load_processor(folder, kind)
            if is_sound or hasattr(found, "tokenizer"):
                arguments = frozenset(self.factory.arguments())
                start = getattr(config, "decoder_start_token_id", None)
                ratio = None
                if self.task.labels == "transcript":
                    ratio = getattr(config, "inputs_to_logits_ratio", None)
                return Processing(found, arguments, start, ratio)

        message = f"{self.factory.name} is trained on what its own processor makes of a file"
        files = " or ".join(PROCESSOR_FILES[:2])
        remedy = f"Give --weights with {files} and the tokenizer beside them."
        raise InputError(f"{message}, and none is there.", remedy)

    def _normalisation(self) -> Normalisation:
        """What the weights were trained with; where nothing says it, half and half, as for ViT."""
        default = Normalisation()
        if self.weights is None:
            return default
        name = "preprocessor_config.json"
        file = _beside(self.weights, name)
        if file is None:
            return default

        with blaming(name, self.weights):
            settings = json.loads(read_text(file))
            if not settings.get("do_normalize", True):
                return Normalisation((0.0,), (1.0,))
            mean = settings.get("image_mean", default.mean)
            deviation = settings.get("image_std", default.deviation)
            return Normalisation(tuple(map(float, mean)), tuple(map(float, deviation)))


def _beside(weights: str | Path, name: str) -> Path | None:
    """A file in a directory of weights or under a hub id; None where there is none."""
    found = transformers.utils.cached_file(
        str(weights),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def blaming(part: str, weights: str | Path) -> AbstractContextManager[None]:
    """An InputError for what fails while a part is loaded from beside the weights."""

    def message(error: BaseException) -> str:
        return f"the {part} in {weights} cannot be loaded: {sentence(error)}."

    return as_input_error(message, "Give a directory that save_pretrained of this model wrote.")
