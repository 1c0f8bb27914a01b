"""What `autofit train` runs: trains a saved result on a data file."""

import dataclasses
import json
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from autofit.api.file_reader import FileReader, blaming
from autofit.api.fit import Trained, fit
from autofit.core.errors import InputError, OutOfMemoryError
from autofit.core.events import Listener, Note
from autofit.core.layout import Layout
from autofit.core.place import given_place
from autofit.core.record import RECORD, Record
from autofit.core.result import SavedResult
from autofit.core.tasks import TASKS
from autofit.core.workload import LEARNT, Hyperparameters
from autofit.data.options import DataOptions
from autofit.export.source import NOTHING_MEASURED
from autofit.models import HuggingFaceModel, workload_from_source
from autofit.report.remedies import measured_remedies, remedy_lines
from autofit.training.loop import Callback
from autofit.training.step_trace import SteadyStep, StepTrace

_DEQUANTISED = (
    "compressed-tensors",
    "fp8",
    "mxfp4",
)  # what transformers restores as it loads, where the model's own config says so
_MOST_NAMED = 5  # of missing weights
_PEEK = 12  # batches that a processor makes before training, which take as long as those of training


def train(
    result: Path | SavedResult,
    data: Path,
    *,
    weights: str | Path | None = None,
    allow_missing: bool = False,
    eval_data: Path | None = None,
    packing: bool | None = None,
    learn: str = LEARNT[0],
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
        allow_missing: start what the weights lack, such as a new head, from random numbers.
        packing: None: as the search chose that knew its data, else by the form of the data.
        learn: "assistant": of chats the assistant's turns, of prompts the completions. "all": all tokens.
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
    packing = saved.workload.get("packing") if packing is None else packing
    apart = bool(packing and saved.workload.get("document_tokens"))
    options = DataOptions(packing, apart, learn=learn, progress=progress)
    reader = FileReader(workload, factory, weights, trust_remote_code, options, listener)
    loader = reader.loader(data)
    eval_loader = reader.loader(eval_data, names=loader.label_names) if eval_data else None
    torch.manual_seed(seed)
    model = factory() if weights is None else _load(factory, weights, allow_missing, listener)
    config: Any = model.config
    if loader.label_names:
        config.id2label = {**config.id2label, **{number: name for name, number in loader.label_names.items()}}
        config.label2id = {name: number for number, name in config.id2label.items()}
    if TASKS[workload.task].classifies_texts:  # decoders classify the last token that is not padding
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


def _load(factory: HuggingFaceModel, weights: str | Path, allow_missing: bool, listener: Listener) -> Any:
    if Path(weights, "adapter_config.json").exists():
        message = f"{weights} holds a LoRA adapter, not the weights of a model."
        raise InputError(message, "Merge it into its model (merge_and_unload of peft), and give what that saves.")
    quantised = _quantised_by(Path(weights))
    dequantised = quantised in _DEQUANTISED and factory.config.get("quantization_config")
    if quantised is not None and not dequantised:
        message = f"{weights} holds weights that are quantised already ({quantised}), and training needs plain ones."
        remedy = "Give the unquantised weights: training quantises them itself where the result's quantization says so."
        raise InputError(message, remedy)
    with blaming("weights", weights):
        model, loaded = getattr(transformers, factory.auto_class()).from_pretrained(
            weights,
            config=factory.transformers_config(),
            trust_remote_code=factory.trust_remote_code,
            output_loading_info=True,
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        more = f" (and {len(missing) - _MOST_NAMED} more)" if len(missing) > _MOST_NAMED else ""
        lacking = f"the weights in {weights} lack {', '.join(missing[:_MOST_NAMED])}{more}"
        if not allow_missing:
            remedy = "Check that they are of this model; --allow-missing starts a new head from random numbers."
            raise InputError(f"{lacking}.", remedy)
        listener(Note(f"{lacking}: that starts from random numbers."))
    return model


def _quantised_by(weights: Path) -> str | None:
    """By what the weights of a directory are quantised, as its config.json says; None for plain ones."""
    file = weights / "config.json"
    if not file.is_file():
        return None
    try:
        given = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    except ValueError:  # what transformers says of in a sentence
        return None
    return str(given.get("quant_method") or "quantization_config in its config.json") if given else None
