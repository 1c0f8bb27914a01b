"""What `autofit train` runs: trains a saved result on a data file."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from autofit.api.file_reader import FileReader, blaming
from autofit.api.fit import Trained, fit
from autofit.api.saved_place import place_of
from autofit.api.train_pictures import train_pictures
from autofit.core.config import Config
from autofit.core.errors import InputError, OutOfMemoryError
from autofit.core.events import Listener, Note
from autofit.core.layout import Layout
from autofit.core.place import given_place
from autofit.core.record import RECORD, Record
from autofit.core.result import SavedResult
from autofit.core.task import REFERENCE, TEACHER
from autofit.core.tasks import TASKS
from autofit.core.workload import LEARNT, Hyperparameters
from autofit.data.options import DataOptions
from autofit.export.source import NOTHING_MEASURED
from autofit.models import HuggingFaceModel, workload_from_source
from autofit.models.diffusion.pipeline import DiffusersModel
from autofit.models.losses import with_options
from autofit.report.remedies import measured_remedies, remedy_lines
from autofit.training.loop import Callback
from autofit.training.step_trace import SteadyStep, StepTrace

# What transformers dequantises as it loads, where the model's own config says so.
_DEQUANTISED = ("compressed-tensors", "fp8", "mxfp4")
_MOST_NAMED = 5  # of missing weights
_PEEK = 12  # batches of a processor to look at before training: each takes as long as in training


def train(
    result: Path | SavedResult,
    data: Path,
    *,
    weights: str | Path | None = None,
    allow_missing: bool = False,
    teacher_weights: str | Path | None = None,
    loss_options: Mapping[str, Any] | None = None,
    eval_data: Path | None = None,
    packing: bool | None = None,
    by_shape: bool = False,
    learn: str = LEARNT[0],
    output: Path | None = None,
    sample_every: int | None = None,
    sample_prompts: Sequence[str] = (),
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
        allow_missing: start what the weights lack, such as a new head, from random numbers.
        teacher_weights: of the model that a distillation learns from, as `weights`.
        loss_options: of the loss of the task, such as {"beta": 0.2}; others are as in
            `autofit.losses`.
        packing: None: as the search chose that knew its data, else by the form of the data.
        by_shape: pictures keep about their own shapes, in batches of one shape each; else all are
            cut to one.
        learn: "assistant": of chats the assistant's turns, of prompts the completions. "all": all
            tokens.
        output: receives the checkpoints and the model, with its tokenizer.
        sample_every: sample pictures of a denoiser are made before training and every so many steps,
            in `output`/samples; None: never.
        sample_prompts: what they are to show; none: the first two captions.
        memory_snapshot: trace the third step into `output`.
        progress: show bars on stderr, while data is read for the first time and while training;
            where that is no terminal, a line now and then.
        training: further arguments of `fit`: lr, schedule, steps, epochs, resume, checkpoint_every,
            ...

    Raises:
        InputError: the result is of a model that cannot be made again here, or the data does not
        suit its task.
    """
    saved = result if isinstance(result, SavedResult) else SavedResult.load(result)
    workload = workload_from_source(
        saved.source,
        saved.workload,
        trust_remote_code=trust_remote_code,
    )
    if isinstance(workload.model, DiffusersModel):
        if packing is not None or memory_snapshot or teacher_weights is not None:
            message = (
                "packing, padding, memory snapshots and teachers are not for models of pictures."
            )
            raise InputError(message, "Leave them out.")
        return train_pictures(
            saved,
            workload,
            data,
            weights=weights,
            eval_data=eval_data,
            loss_options=loss_options,
            output=output,
            by_shape=by_shape,
            sample_every=sample_every,
            sample_prompts=sample_prompts,
            seed=seed,
            progress=progress,
            callbacks=callbacks,
            listener=listener,
            **training,
        )

    if by_shape or sample_every is not None or sample_prompts:
        remedy = "Leave by_shape, sample_every and sample_prompts out."
        raise InputError(f"{saved.model} is no model of pictures.", remedy)
    factory = workload.model
    assert isinstance(factory, HuggingFaceModel), "what a file describes is a model of transformers"
    if saved.predicted:
        listener(Note(f"{NOTHING_MEASURED} It may need more memory, or be slower, than predicted."))

    devices = training.get("devices") or Layout.of(saved.config).world
    if memory_snapshot and devices > 1:
        message = "memory snapshots are taken on one device, and this config is for several."
        raise InputError(message, "Leave it out.")

    # Checks them before the data is read.
    names = {field.name for field in dataclasses.fields(Hyperparameters)} & training.keys()
    learning = {name: training[name] for name in names if training[name] is not None}
    Hyperparameters(seed=seed, **learning)

    if packing is None:
        packing = saved.workload.get("packing")
    apart = bool(packing and saved.workload.get("document_tokens"))
    options = DataOptions(packing, apart, learn=learn, progress=progress)
    reader = FileReader(workload, factory, weights, trust_remote_code, options, listener)
    loader = reader.loader(data)
    evaluated = None
    if eval_data:
        evaluated = reader.loader(eval_data, names=loader.label_names)
    if Config(saved.config).reference == "precomputed":
        loader = loader.with_blank(REFERENCE)
        evaluated = evaluated and evaluated.with_blank(REFERENCE)
    eval_loader = evaluated and evaluated.in_order

    loss = with_options(workload.loss, loss_options or {})
    frozen = dict(workload.frozen)
    teacher = frozen.get(TEACHER)
    if teacher is None and teacher_weights is not None:
        message = f"the task is {workload.task}, which has no teacher."
        raise InputError(message, "Leave --teacher-weights out.")
    if isinstance(teacher, HuggingFaceModel) and weights is not None and teacher_weights is None:
        message = f"the weights of the teacher {teacher.name} are missing."
        raise InputError(message, "Give --teacher-weights DIR.")
    if isinstance(teacher, HuggingFaceModel) and teacher_weights is not None:
        frozen[TEACHER] = _load(teacher, teacher_weights, False, listener)

    torch.manual_seed(seed)
    model = factory() if weights is None else _load(factory, weights, allow_missing, listener)
    config: Any = model.config
    if loader.label_names:
        given = {number: name for name, number in loader.label_names.items()}
        config.id2label = {**config.id2label, **given}
        config.label2id = {name: number for number, name in config.id2label.items()}
    if TASKS[workload.task].pools_texts:  # decoders do so by the last token before the padding
        config.get_text_config().pad_token_id = reader.tokenizer.pad_token_id or 0

    where = place_of(saved)
    if reader.processing is not None:
        training.setdefault("peek", _PEEK)

    step_trace = None
    if memory_snapshot and output:
        step_trace = StepTrace(output, where["device"])
    with SteadyStep(step_trace) if step_trace else nullcontext() as recorder:
        if recorder:
            callbacks = (*callbacks, recorder)
        try:
            trained = fit(
                model,
                loader,
                loss=loss,
                frozen=frozen,
                config=saved.config,
                eval_loader=eval_loader,
                seed=seed,
                output_dir=output,
                callbacks=callbacks,
                listener=listener,
                progress=progress,
                **training,
                **where,
            )
        except OutOfMemoryError as error:
            if isinstance(result, Path):
                error.remedy = _what_fitted(result, saved) or error.remedy
            raise

    if step_trace and recorder:
        note = step_trace.message
        if not recorder.done:
            note = "no step was recorded: fewer than three were trained."
        listener(Note(note))
    place = given_place()
    if output and (place is None or not place.rank):
        reader.save(output / "model")
    return trained


def _what_fitted(result: Path, saved: SavedResult) -> str:
    """A remedy: what the search of this result measured to fit in less memory; "" where that is not
    known."""
    with suppress(InputError):
        record = Record.load(result.with_name(RECORD))
        remedies = measured_remedies(record.result, saved.config)
        if remedies:
            lines = "; or ".join(remedy_lines(remedies))
            return f"Its search measured less memory with {lines}: set it in {result}."
    return ""


def _load(
    factory: HuggingFaceModel,
    weights: str | Path,
    allow_missing: bool,
    listener: Listener,
) -> Any:
    """The model with weights of a directory or a hub id; raises InputError where they are not of
    it."""
    if Path(weights, "adapter_config.json").exists():
        message = f"{weights} holds a LoRA adapter, not the weights of a model."
        remedy = "Merge it into its model (merge_and_unload of peft), and give what that saves."
        raise InputError(message, remedy)

    method = _quantised_by(Path(weights))
    is_restored = method in _DEQUANTISED and factory.config.get("quantization_config")
    if method is not None and not is_restored:
        raise InputError(
            f"{weights} holds weights that are quantised already ({method}), and training needs plain ones.",
            "Give the unquantised weights: training quantises them itself where the result's quantization says so.",
        )

    auto_class = getattr(transformers, factory.auto_class())
    with blaming("weights", weights):
        model, loaded = auto_class.from_pretrained(
            weights,
            config=factory.transformers_config(),
            trust_remote_code=factory.trust_remote_code,
            output_loading_info=True,
        )

    missing = sorted(loaded["missing_keys"])
    if missing:
        lacking = f"the weights in {weights} lack {', '.join(missing[:_MOST_NAMED])}"
        more = len(missing) - _MOST_NAMED
        if more > 0:
            lacking += f" (and {more} more)"
        if not allow_missing:
            remedy = "Check that they are of this model; --allow-missing starts a new head from random numbers."
            raise InputError(f"{lacking}.", remedy)
        listener(Note(f"{lacking}: that starts from random numbers."))
    return model


def _quantised_by(weights: Path) -> str | None:
    """By what the weights of a directory are quantised, as its config.json says; None for plain
    ones."""
    file = weights / "config.json"
    if not file.is_file():
        return None

    try:
        quantization = json.loads(file.read_text(encoding="utf-8"))["quantization_config"]
    except (LookupError, TypeError, ValueError):  # transformers raises a better one as it loads
        return None
    if not quantization:
        return None
    if isinstance(quantization, dict) and quantization.get("quant_method"):
        return str(quantization["quant_method"])
    return "quantization_config in its config.json"
