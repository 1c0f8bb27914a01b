"""Training a saved result on a data file: what `autofit train` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from autofit.core.errors import InputError
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.fit import Trained, fit
from autofit.models import HuggingFaceModel, workload_from_source
from autofit.models.huggingface import AUTO_CLASSES, sentence
from autofit.training.run import StepReport
from autofit.training.text import FileLoader, file_loader
from autofit.tune import Listener


@dataclass(frozen=True)
class TrainOptions:
    """What `autofit train` is told beside the result and the data. `weights` None: from scratch."""

    weights: Path | None = None
    steps: int | None = None
    epochs: int | None = None
    lr: float = 1e-4
    output: Path | None = None
    resume: bool = False
    seed: int = 0
    trust_remote_code: bool = False


def train_saved(
    result: Path,
    data: Path,
    options: TrainOptions,
    *,
    callbacks: tuple[Callable[[StepReport], None], ...] = (),
    listener: Listener | None = None,
) -> Trained:
    """Train the config of a result.yaml on a file.

    Raises:
        InputError: the result is of a model that cannot be made again here, or the data does not suit its task.
    """
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
    torch.manual_seed(options.seed)
    loader = file_loader(workload, data, tokenizer=_tokenizer(options.weights))
    _check_sizes(loader, workload.model)
    return fit(
        _model(workload, workload.model, options.weights),
        loader,
        lr=options.lr,
        steps=options.steps,
        epochs=options.epochs,
        config=saved.config,
        callbacks=callbacks,
        output_dir=options.output,
        resume=options.resume,
        seed=options.seed,
        listener=listener,
        device=saved.hardware.get("device"),
    )


def _model(workload: Workload, factory: HuggingFaceModel, weights: Path | None) -> nn.Module:
    if weights is None:
        return factory()
    auto_class = getattr(transformers, AUTO_CLASSES[workload.task])
    with _blamed_on("weights", weights):
        model: nn.Module = auto_class.from_pretrained(
            weights, config=factory.transformers_config(), trust_remote_code=factory.trust_remote_code
        )
    return model


@contextmanager
def _blamed_on(part: str, weights: Path) -> Iterator[None]:
    """Tell whatever libraries stumble over in somebody's files as one sentence."""
    try:
        yield
    except Exception as error:
        message = f"the {part} in {weights} cannot be loaded: {sentence(error)}."
        raise InputError(message, "Give a directory that save_pretrained of this model wrote.") from error


def _check_sizes(loader: FileLoader, factory: HuggingFaceModel) -> None:
    """Token ids and classes beyond the model's would end the first step with an index that is out of range."""
    config = factory.transformers_config()
    if "input_ids" in loader.samples:
        largest, known = int(loader.samples["input_ids"].max()), int(config.get_text_config().vocab_size)
        if largest >= known:
            message = f"the data has token ids up to {largest}, but {factory.name} knows {known} tokens."
            raise InputError(message, "Give --weights with the tokenizer of this model beside them.")
    if factory.task.endswith("classification"):
        largest, known = int(loader.samples["labels"].max()), int(config.num_labels)
        if largest >= known:
            message = f"the data has {largest + 1} classes, but {factory.name} has {known}."
            raise InputError(message, "Set num_labels in the model's config.json, and search again.")


def _tokenizer(weights: Path | None) -> Any:
    """The tokenizer that lies beside the weights, or None."""
    if weights is None or not (weights / "tokenizer_config.json").exists():
        return None
    with _blamed_on("tokenizer", weights):
        return transformers.AutoTokenizer.from_pretrained(weights)
