"""What `autofit train` runs: trains a saved result on a data file."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from autofit.api.fit import Trained, fit
from autofit.core.errors import InputError, OutOfMemoryError, reported, sentence
from autofit.core.events import Listener, Note
from autofit.core.files import read_text
from autofit.core.layout import Layout
from autofit.core.place import given_place
from autofit.core.record import RECORD, Record
from autofit.core.result import SavedResult
from autofit.core.workload import Hyperparameters, Workload
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
from autofit.export.source import NOTHING_MEASURED
from autofit.models import HuggingFaceModel, workload_from_source
from autofit.report.remedies import measured_remedies, remedy_lines
from autofit.training.loop import Callback
from autofit.training.step_trace import SteadyStep, StepTrace

_PEEK = 12  # batches that a processor makes before training, which take as long as those of training


def train(
    result: Path | SavedResult,
    data: Path,
    *,
    weights: str | Path | None = None,
    eval_data: Path | None = None,
    packing: bool | None = None,
    output: Path | None = None,
    memory_snapshot: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    progress: bool = False,
    callbacks: tuple[Callback, ...] = (),
    listener: Listener = lambda _: None,
    **training: Any,
) -> Trained:
    """Train the config of a result, or of a result.yaml, on a file.

    Args:
        weights: a directory or a hub id; None: from scratch.
        packing: None: by the form of the data.
        output: receives the checkpoints and the model, with its tokenizer.
        memory_snapshot: trace the third step into `output`.
        progress: show bars on stderr, while data is read for the first time and while training.
        training: further arguments of `fit`: lr, schedule, steps, epochs, resume, checkpoint_every, ...

    Raises:
        InputError: the result is of a model that cannot be made again here, or the data does not suit its task.
    """
    saved = result if isinstance(result, SavedResult) else SavedResult.load(result)
    workload = workload_from_source(saved.source, saved.workload, trust_remote_code=trust_remote_code)
    factory = workload.model
    assert isinstance(factory, HuggingFaceModel), "what a file describes is a model of transformers"
    if saved.predicted:
        listener(Note(f"{NOTHING_MEASURED} It may need more memory, or be slower, than predicted."))
    if memory_snapshot and (training.get("devices") or Layout.of(saved.config).world) > 1:
        raise InputError("memory snapshots are taken on one device, and this config is for several.", "Leave it out.")
    names = {field.name for field in dataclasses.fields(Hyperparameters)} & training.keys()
    Hyperparameters(seed=seed, **{name: training[name] for name in names})  # checks them before the data is read
    options = DataOptions(packing, progress=progress)
    reader = _Reader(workload, factory, weights, trust_remote_code, options, listener)
    loader = reader.loader(data)
    eval_loader = reader.loader(eval_data, names=loader.label_names) if eval_data else None
    torch.manual_seed(seed)
    model = factory() if weights is None else _load(workload, factory, weights)
    config: Any = model.config
    if loader.label_names:
        config.id2label = {**config.id2label, **{number: name for name, number in loader.label_names.items()}}
        config.label2id = {name: number for number, name in config.id2label.items()}
    if workload.task == "sequence-classification":  # decoders classify the last token that is not padding
        config.get_text_config().pad_token_id = reader.tokenizer.pad_token_id or 0
    device = saved.hardware.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    step_trace = StepTrace(output, device) if memory_snapshot and output else None
    with SteadyStep(step_trace) if step_trace else nullcontext() as recorder:
        callbacks = (*callbacks, recorder) if recorder else callbacks
        training |= {"eval_loader": eval_loader.in_order if eval_loader else None, "seed": seed, "output_dir": output}
        if reader.processing is not None:  # looking for the largest batch makes each
            training.setdefault("peek", _PEEK)
        training |= {"callbacks": callbacks, "listener": listener, "progress": progress, "device": device}
        training["mem" if device == "cpu" else "gpu_mem"] = saved.hardware.get("budget_gib") or None
        try:
            trained = fit(model, loader, loss=workload.loss, config=saved.config, **training)
        except OutOfMemoryError as error:
            error.remedy = (isinstance(result, Path) and _what_fitted(result, saved)) or error.remedy
            raise
    if step_trace and recorder:
        listener(Note(step_trace.message if recorder.done else "no step was recorded: fewer than three were trained."))
    place = given_place()
    if output and (place is None or not place.rank):
        reader.save(output / "model")
    return trained


def _what_fitted(result: Path, saved: SavedResult) -> str:
    """What the search of this result measured to fit in less memory; empty where that is not known."""
    with suppress(InputError):
        found = measured_remedies(Record.load(result.with_name(RECORD)).result, saved.config)
        if found:
            return f"Its search measured less memory with {'; or '.join(remedy_lines(found))}: set it in {result}."
    return ""


@dataclass
class _Reader:
    """Reads data files for one model: with its tokenizer or processor, its classes, its images' normalisation."""

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
        """The loader of a file; `names` are the classes of the training data, to which evaluation data keeps."""
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
        """The tokenizer beside the weights or, for a directory, beside the model's config; else one of bytes."""
        for folder in self.folders:
            if any(_beside(folder, f"tokenizer{end}.json") for end in ("_config", "")):
                with _blaming("tokenizer", folder):
                    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trusted)
        self.listener(Note("no tokenizer beside the weights: the bytes of the text are its token ids."))
        return byte_tokenizer()

    def _processing(self) -> Processing:
        """The processor beside the weights or, for a directory, beside the model's config."""
        config, task = self.factory.transformers_config(), self.workload.task
        for folder in self.folders:
            if any(_beside(folder, name) for name in PROCESSOR_FILES):
                with _blaming("processor", folder):
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
        with _blaming(name, self.weights):
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


def _load(workload: Workload, factory: HuggingFaceModel, weights: str | Path) -> Any:
    if Path(weights, "adapter_config.json").exists():
        message = f"{weights} holds a LoRA adapter, not the weights of a model."
        raise InputError(message, "Merge it into its model (merge_and_unload of peft), and give what that saves.")
    with _blaming("weights", weights):
        return getattr(transformers, factory.auto_class()).from_pretrained(
            weights, config=factory.transformers_config(), trust_remote_code=factory.trust_remote_code
        )


def _blaming(part: str, weights: str | Path) -> AbstractContextManager[None]:
    remedy = "Give a directory that save_pretrained of this model wrote."
    return reported(lambda error: f"the {part} in {weights} cannot be loaded: {sentence(error)}.", remedy)
