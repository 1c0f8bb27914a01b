"""Training a saved result on a data file: what `autofit train` runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import nn

from autofit.api.fit import Trained, fit
from autofit.core.errors import InputError
from autofit.core.events import Note
from autofit.core.result import SavedResult
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.file_loader import file_loader
from autofit.data.options import DataOptions, LabelRule, Normalisation
from autofit.data.samples import FileLoader
from autofit.export.source import NOTHING_MEASURED
from autofit.models import HuggingFaceModel, workload_from_source
from autofit.models.huggingface import AUTO_CLASSES, sentence
from autofit.training.loop import StepReport
from autofit.training.step_trace import SteadyStep, StepTrace
from autofit.tuning.run import Listener


@dataclass(frozen=True)
class TrainOptions:
    """What `autofit train` is told beside the result and the data.

    `weights` is a directory or a hub id; None: from scratch. `packing` None: by the form of the data. `progress` shows
    bars on stderr, while data is read for the first time and while training. `memory_snapshot` keeps a record of the
    third step in `output`.
    """

    weights: str | Path | None = None
    eval_data: Path | None = None
    packing: bool | None = None
    steps: int | None = None
    epochs: int | None = None
    lr: float = 1e-4
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    output: Path | None = None
    resume: bool = False
    checkpoint_every: int = 200
    keep_last: int = 2
    seed: int = 0
    memory_snapshot: bool = False
    trust_remote_code: bool = False
    progress: bool = False


def train_saved(
    result: Path,
    data: Path,
    options: TrainOptions,
    *,
    callbacks: tuple[Callable[[StepReport], None], ...] = (),
    listener: Listener | None = None,
    restart: Callable[[], NoReturn] | None = None,
) -> Trained:
    """Train the config of a result.yaml on a file; with an output directory the tokenizer is kept beside the model.

    Raises:
        InputError: the result is of a model that cannot be made again here, or the data does not suit its task.
    """
    if options.memory_snapshot and options.output is None:
        raise InputError("--memory-snapshot has nowhere to write to.", "Give --output DIR.")
    saved = SavedResult.load(result)
    workload = workload_from_source(
        saved.source,
        sequence_length=saved.workload.get("sequence_length"),
        effective_batch_size=saved.workload.get("effective_batch_size"),
        trust_remote_code=options.trust_remote_code,
    )
    if not isinstance(workload.model, HuggingFaceModel):
        message = f"{saved.model} is a function of yours, with data of its own."
        raise InputError(message, "Train it in Python: autofit.fit(model, loader, config=...).")
    listener = listener or (lambda _: None)
    if saved.predicted:
        listener(Note(f"{NOTHING_MEASURED} It may need more memory, or be slower, than predicted."))
    Hyperparameters(  # a mistake in one is told before the data is read
        options.lr,
        options.weight_decay,
        options.schedule,
        options.warmup_steps,
        options.max_grad_norm,
        options.seed,
    )
    reader = _Reader(workload, workload.model, options, listener)
    loader = reader.loader(data)
    eval_loader = reader.loader(options.eval_data, names=loader.label_names) if options.eval_data else None
    torch.manual_seed(options.seed)
    model = _model(workload, workload.model, options.weights)
    _describe_data(model, loader, pad_id=reader.pad_id)
    with _recorded(options, str(saved.hardware["device"]), listener) as recorders:
        trained = fit(
            model,
            loader,
            lr=options.lr,
            weight_decay=options.weight_decay,
            schedule=options.schedule,
            warmup_steps=options.warmup_steps,
            max_grad_norm=options.max_grad_norm,
            steps=options.steps,
            epochs=options.epochs,
            config=saved.config,
            eval_loader=eval_loader.in_order if eval_loader else None,
            callbacks=(*callbacks, *recorders),
            output_dir=options.output,
            resume=options.resume,
            checkpoint_every=options.checkpoint_every,
            keep_last=options.keep_last,
            seed=options.seed,
            listener=listener,
            progress=options.progress,
            restart=restart,
            device=saved.hardware["device"],
        )
    if options.output and reader.tokenizer is not None:
        reader.tokenizer.save_pretrained(options.output / "model")
    return trained


@contextmanager
def _recorded(options: TrainOptions, device: str, listener: Listener) -> Iterator[tuple[SteadyStep, ...]]:
    """The callback that keeps a record of one step, where that is asked for; what came of it is told at the end."""
    if not options.memory_snapshot or options.output is None:
        yield ()
        return
    trace = StepTrace(options.output, device)
    with SteadyStep(trace) as recorder:
        yield (recorder,)
    listener(Note(trace.message if recorder.done else "no step was recorded: fewer than three were trained."))


class _Reader:
    """Reads data files for one model: with its tokenizer, its classes and what its images are normalised with."""

    def __init__(
        self, workload: Workload, factory: HuggingFaceModel, options: TrainOptions, listener: Listener
    ) -> None:
        self._workload = workload
        self._factory = factory
        self._listener = listener
        self._options = options
        self.tokenizer: Any = None if workload.task == "image-classification" else self._tokenizer()

    @property
    def pad_id(self) -> int | None:
        """What pads the texts of a classifier."""
        return (self.tokenizer.pad_token_id or 0) if self._workload.task == "sequence-classification" else None

    def loader(self, path: Path, *, names: Mapping[str, int] | None = None) -> FileLoader:
        """The loader of a file; `names` are the classes of the training data, which evaluation data keeps to."""
        images = self._workload.task == "image-classification"
        options = DataOptions(
            packing=self._options.packing,
            labels=self._labels(names),
            normalisation=self._normalisation() if images else Normalisation(),
            progress=self._options.progress,
        )
        loader = file_loader(self._workload, path, tokenizer=self.tokenizer, options=options)
        for note in loader.notes:
            self._listener(Note(note))
        self._check_vocabulary(loader)
        return loader

    def _labels(self, names: Mapping[str, int] | None) -> LabelRule:
        config = self._factory.transformers_config()
        if not self._factory.task.endswith("classification"):
            return LabelRule()
        if config.num_labels > 1 and config.problem_type not in (None, "single_label_classification"):
            message = f"{self._factory.name} takes several labels for each sample, which data files here do not have."
            raise InputError(message, "Train it in Python: autofit.fit(model, loader, config=...).")
        known = {name: int(number) for number, name in config.id2label.items()} if names is None else names
        return LabelRule(int(config.num_labels), known, strict=names is not None)

    def _check_vocabulary(self, loader: FileLoader) -> None:
        """A token id beyond the model's would end the first step with an index that is out of range."""
        if self.tokenizer is None:
            return
        found = max(loader.samples.largest("input_ids") or 0, loader.mask_id or 0)
        known = int(self._factory.transformers_config().get_text_config().vocab_size)
        if found >= known:
            message = f"the data has token ids up to {found}, but {self._factory.name} knows {known} tokens."
            raise InputError(message, "Give --weights with the tokenizer of this model beside them.")

    def _tokenizer(self) -> Any:
        """The tokenizer beside the weights or, from a directory, beside the model's config; else one of bytes."""
        source = self._factory.source
        for place in (self._options.weights, source.get("path") if source.get("kind") == "directory" else None):
            if place is not None and any(_beside(place, name) for name in ("tokenizer_config.json", "tokenizer.json")):
                with _blamed_on("tokenizer", place):
                    return transformers.AutoTokenizer.from_pretrained(
                        place, trust_remote_code=self._options.trust_remote_code
                    )
        self._listener(Note("no tokenizer beside the weights: the bytes of the text are its token ids."))
        return byte_tokenizer()

    def _normalisation(self) -> Normalisation:
        """What the weights were trained with; half and half, as ViT was, where nothing says."""
        weights = self._options.weights
        file = None if weights is None else _beside(weights, "preprocessor_config.json")
        if weights is None or file is None:
            return Normalisation()
        with _blamed_on("preprocessor_config.json", weights):
            told = json.loads(file.read_text(encoding="utf-8"))
            default = Normalisation()
            if not told.get("do_normalize", True):
                return Normalisation((0.0,), (1.0,))
            mean, deviation = told.get("image_mean", default.mean), told.get("image_std", default.deviation)
            return Normalisation(tuple(map(float, mean)), tuple(map(float, deviation)))


def _beside(weights: str | Path, name: str) -> Path | None:
    """A file of a directory of weights or of a hub id's; None where there is none."""
    if Path(weights).is_dir():
        file = Path(weights) / name
        return file if file.exists() else None
    found = transformers.utils.cached_file(
        str(weights), name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _describe_data(model: nn.Module, loader: FileLoader, *, pad_id: int | None) -> None:
    """Tell the model's config what its classes are called, and what pads: decoders classify the last other token."""
    config: Any = model.config
    if loader.label_names:
        config.id2label = {**config.id2label, **{number: name for name, number in loader.label_names.items()}}
        config.label2id = {name: number for number, name in config.id2label.items()}
    if pad_id is not None:
        config.get_text_config().pad_token_id = pad_id


def _model(workload: Workload, factory: HuggingFaceModel, weights: str | Path | None) -> nn.Module:
    if weights is None:
        return factory()
    if Path(weights, "adapter_config.json").exists():
        message = f"{weights} holds a LoRA adapter, not the weights of a model."
        raise InputError(message, "Merge it into its model (merge_and_unload of peft), and give what that saves.")
    auto_class = getattr(transformers, AUTO_CLASSES[workload.task])
    with _blamed_on("weights", weights):
        model: nn.Module = auto_class.from_pretrained(
            weights, config=factory.transformers_config(), trust_remote_code=factory.trust_remote_code
        )
    return model


@contextmanager
def _blamed_on(part: str, weights: str | Path) -> Iterator[None]:
    """Tell whatever libraries stumble over in somebody's files as one sentence."""
    try:
        yield
    except Exception as error:
        message = f"the {part} in {weights} cannot be loaded: {sentence(error)}."
        raise InputError(message, "Give a directory that save_pretrained of this model wrote.") from error
