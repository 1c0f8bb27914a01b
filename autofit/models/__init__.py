"""Models: from what the user names (a preset, a directory, a hub id, a function) to a Workload, and
back again.

Presets are data, in presets.yaml and shapes/. Importing this room, and listing the presets, loads
neither torch nor transformers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autofit.core.errors import InputError, is_whole, require, shown, unknown
from autofit.core.task import TEACHER
from autofit.core.tasks import TASK_NAMES, TASKS
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.workload import Workload
from autofit.models import losses as losses
from autofit.models.config_json import check_directory, is_hub_id, read_directory, read_hub
from autofit.models.diffusion.pipeline import (
    DiffusersModel,
    PictureSizes,
    diffusion_workload,
    is_pipeline,
    preset_pipeline,
    read_pipeline,
)
from autofit.models.diffusion.pipeline import presets as _pipelines
from autofit.models.fake_quantised import FakeQuantisation
from autofit.models.functions import (
    function_workload,
    is_function,
    make_importable,
    names_transformers,
)
from autofit.models.heads import HEADS
from autofit.models.huggingface import (
    ASKS_INPUTS,
    HEAD,
    OPTIONS,
    PARTS,
    ROUNDS,
    SEES,
    SPARES,
    TEXTS,
    TILES,
    HuggingFaceModel,
    huggingface_workload,
)
from autofit.models.presets import Preset, load_preset, preset_model, preset_names, presets
from autofit.models.tasks.choice import chosen_task
from autofit.models.tiled_mlp import TiledMlp
from autofit.models.trained_parts import check_parts

__all__ = [
    "HuggingFaceModel",
    "resolve",
    "make_importable",
    "names_transformers",
    "workload_from_source",
]
__all__ += [
    "Preset",
    "describe_presets",
    "load_preset",
    "preset_model",
    "preset_names",
]


# By so many tokens vocabularies of one tokenizer are padded differently: Qwen 2.5 has 151,936 and
# 152,064.
_PADDED = 1024


class Sizes(NamedTuple):
    """The sizes of a workload that are asked for; None: the usual ones."""

    sequence_length: int | None = None
    effective_batch_size: int | None = None


LossOptions = Mapping[str, Any] | None  # of the loss of a task, such as {"beta": 0.2}


# The keys of a `source:` that name its model, by kind.
_NAMED_BY = {"preset": "model", "directory": "path", "hub": "model", "function": "function"}
# What a model may be named by besides.
_OTHER_MODELS = "Others: a directory with config.json, a hub id (OWNER/NAME) or file.py:FUNCTION."
PICTURES = ("resolution", "frames", "train_text_encoders")  # of models of pictures alone


def model_names() -> tuple[str, ...]:
    """The names of all presets, those of diffusers' pipelines last."""
    return (*presets(), *_pipelines())


def describe_presets() -> list[dict[str, Any]]:
    """Name, task, parameters and hub id of every preset: what `autofit models --json` prints."""
    rows = []
    for preset in presets().values():
        row = {
            "name": preset.name,
            "task": preset.task,
            "parameters": preset.parameters,
            "hub": preset.hub,
        }
        rows.append(row)

    for name, entry in _pipelines().items():
        row = {
            "name": name,
            "task": DIFFUSION.name,
            "parameters": int(entry["parameters"]),
            "hub": entry["hub"],
        }
        rows.append(row)

    return rows


def kind_of(model: str) -> str:
    """Whether a name is of a "function", "directory", "preset" or, by its form, of the "hub".

    Loads no transformers.

    Raises:
        InputError: it is none of these, or the directory holds no config.json that can be read.
    """
    if is_function(model):
        return "function"

    path = _existing(model)
    is_preset = model in model_names()
    if path is not None and is_pipeline(path):
        return "directory"

    is_directory = path is not None and path.is_dir()
    if is_directory and is_preset:
        # A folder that happens to be called gpt2 does not hide the preset; one with a config.json
        # is meant.
        is_directory = Path(model, "config.json").expanduser().exists()

    if is_directory:
        check_directory(model)
        return "directory"

    if is_preset:
        return "preset"
    if path is not None:
        remedy = "Give the directory that holds config.json."
        if path.suffix == ".py":
            remedy = f"Write {model}:FUNCTION."
        raise InputError(f"{model} is a file, not a model.", remedy)

    if is_hub_id(model):
        return "hub"
    if "/" in model:
        raise InputError(f"the directory {model} is not there.", "Check the path.")

    error = unknown("model", model, model_names())
    raise InputError(error.message, f"{error.remedy} {_OTHER_MODELS}")


def resolve(
    model: str,
    *,
    task: str | None = None,
    teacher: str | None = None,
    sequence_length: int | None = None,
    effective_batch_size: int | None = None,
    trust_remote_code: bool = False,
    loss_options: LossOptions = None,
    resolution: str | int | None = None,
    frames: int | None = None,
    train_text_encoders: bool = False,
    sees: bool = False,
    stretches: bool = False,
) -> Workload:
    """The workload of what `--model` names, taught by what `--teacher` names where its task asks
    one.

    Args:
        sequence_length: tokens of a sample; of a model of pictures, those of a prompt.
        resolution: of pictures: "1024", or WIDTHxHEIGHT as "832x480".
        frames: of videos.
        train_text_encoders: of Stable Diffusion or SDXL, beside their denoiser.
        loss_options: of the loss of the task, such as {"beta": 0.2}.
        sees: whether images stand in the texts of a task that is of texts.
        stretches: whether a model whose positions are turned, not learnt, takes longer samples than
            it was made for.

    Raises:
        InputError: they name nothing, or what cannot be trained as asked.
    """
    check_task(task)
    rule = "train_text_encoders must be True or False"
    require(isinstance(train_text_encoders, bool), rule, train_text_encoders)
    sizes = Sizes(sequence_length, effective_batch_size)
    kind = kind_of(model)
    if teacher is not None and (task is None or TEACHER not in TASKS[task].frozen):
        message = f"a teacher is for distillation, and the task is {task or 'not given'}."
        raise InputError(message, "Add --task distill, or leave the teacher out.")

    if _is_pipeline(kind, model):
        side = None if resolution is None else str(resolution)
        pictures = PictureSizes(
            side,
            frames,
            sequence_length,
            effective_batch_size,
            train_text_encoders,
        )
        _check_diffusion(model, task)

        return diffusion_workload(_read_pipeline(kind, model), pictures, loss_options)

    _check_no_pictures(model, resolution, frames, train_text_encoders or None)

    if kind == "function":
        if task is not None:
            message = f"the function {model} says itself what it trains"
            message += f", and --task {task} cannot change that."
            raise InputError(message, "Leave --task out.")

        if loss_options is not None:
            message = f"the function {model} says itself what its loss is."
            raise InputError(message, "Leave the options of the loss out.")

        return function_workload(model, **sizes._asdict())

    named = None
    if teacher is not None:
        named = (kind_of(teacher), teacher)
    found = _read(kind, model, task, trust_remote_code, sees=sees)
    if stretches and sequence_length is not None:
        found = found.stretched(sequence_length)

    return _workload(found, named, sizes, trust_remote_code, loss_options)


def _is_pipeline(kind: str, name: str) -> bool:
    """Whether a name is of a pipeline of diffusers."""
    if kind == "preset":
        return name in _pipelines()
    return kind == "directory" and is_pipeline(Path(name).expanduser())


def pipeline_named(name: str) -> DiffusersModel:
    """The model of a preset or a directory. Raises InputError: it is no pipeline of diffusers."""
    return _read_pipeline(kind_of(name), name)


def _read_pipeline(kind: str, name: str) -> DiffusersModel:
    """The model that a pipeline's name means."""
    return preset_pipeline(name) if kind == "preset" else read_pipeline(name)


def _check_diffusion(model: str, task: str | None) -> None:
    """Raise an InputError for what a pipeline's denoiser is not trained for."""
    if task not in (None, DIFFUSION.name):
        message = f"{model} is a pipeline of diffusers, which is trained for {DIFFUSION.name} alone, not {task}."
        raise InputError(message, "Leave --task out.")


def _check_no_pictures(model: str, *given: object) -> None:
    """Raise an InputError for what is `given` of PICTURES for another model."""
    for name, value in zip(PICTURES, given, strict=True):
        if value is not None:
            message = f"{model} makes no pictures, which alone have {name}."
            raise InputError(message, "Leave it out, or name a pipeline of diffusers.")


def needs_images(model: str, task: str) -> bool:
    """Whether a preset or a directory can be trained for a task on texts with an image each, and
    not on texts alone, because transformers has no class for that."""
    kind = kind_of(model)
    if kind not in ("preset", "directory") or not TASKS[task].of_texts or _is_pipeline(kind, model):
        return False
    can_be = []
    for sees in (False, True):
        try:
            _read(kind, model, task, False, sees=sees)
            can_be.append(True)
        except InputError:
            can_be.append(False)

    return can_be == [False, True]


def check_task(task: object) -> None:
    """Raise an InputError for what is no task that a model named can have."""
    if task is not None and task not in TASK_NAMES:
        raise unknown("task", task, TASK_NAMES)


def check_searched(task: object) -> None:
    """Raise an InputError for a task that is only planned: its samples are generated in the
    training."""
    if task in TASK_NAMES and TASKS[str(task)].generated:
        message = f"{task} generates its samples, and is planned, not searched."
        raise InputError(message, f"Use autofit estimate --task {task}.")


def workload_from_source(
    source: Mapping[str, Any],
    summary: Mapping[str, Any],
    *,
    trust_remote_code: bool = False,
) -> Workload:
    """Make a workload again from the `source:` and `workload:` of a result.yaml: the inverse of
    `resolve`.

    A file runs no code: a function that a source names is not called, and the permission to run a
    model's own code has to be given again.

    Raises:
        InputError: as `named_by`.
    """
    sizes = Sizes(summary.get("sequence_length"), summary.get("effective_batch_size"))
    kind, name = named_by(source)
    check_task(summary.get("task"))
    if _is_pipeline(kind, name):
        _check_diffusion(name, summary.get("task"))
        given = {each: source.get(each) for each in (*PICTURES, "prompt_tokens")}
        pictures = PictureSizes(**given, effective_batch_size=sizes.effective_batch_size)
        options = source.get("loss_options")

        return diffusion_workload(_read_pipeline(kind, name), pictures, options)

    sees = source.get(SEES) is True
    model = _read(kind, name, summary.get("task"), trust_remote_code, sees=sees)
    model = dataclasses.replace(
        model,
        parts=check_parts(source.get(PARTS, ())),
        asks_inputs=source.get(ASKS_INPUTS) is True,
        rounds=FakeQuantisation.of_source(source.get(ROUNDS)),
        **_of_samples(source),
    )
    teacher = None
    if isinstance(source.get(TEACHER), Mapping):
        teacher = named_by(source[TEACHER])
    loss_options = source.get("loss_options")
    workload = _workload(model, teacher, sizes, trust_remote_code, loss_options)

    return with_loss_of(workload, summary.get("own_loss"))


def _of_samples(source: Mapping[str, Any]) -> dict[str, Any]:
    """What a `source:` says of a model's samples and its head.

    Raises:
        InputError: it says anything of another kind.
    """
    texts = source.get(TEXTS, 1)
    head = source.get(HEAD, "")
    options = source.get(OPTIONS, {})
    rule = "the texts of a sample must be a positive whole number"
    require(is_whole(texts, 1), rule, texts)
    require(head in ("", *HEADS), "the head must be one that autofit knows", head)
    rule = "options of a config must hold values by name"
    require(isinstance(options, Mapping), rule, options)

    return {
        "texts": texts,
        "head": head,
        "spares_frozen": source.get(SPARES) is True,
        "tiles": TiledMlp.of_source(source.get(TILES)),
        "options": options,
    }


def with_fields(workload: Workload, **fields: Any) -> Workload:
    """The same of a named model with other samples, another head or other keys of its config.

    Args:
        fields: `texts`, `head`, `spares_frozen`, `tiles` and `options` of `HuggingFaceModel`.
    """
    if not fields:
        return workload
    model: Any = workload.model
    if "options" in fields:
        fields["options"] = {**model.options, **fields["options"]}

    return _with_model(workload, **fields)


def with_loss_of(workload: Workload, tool: object) -> Workload:
    """The workload with the loss that a tool computes in place of the model's; None: as it is."""
    if tool not in losses.OF_TOOLS:
        return workload
    loss = losses.OF_TOOLS[str(tool)]()

    return dataclasses.replace(workload, loss=loss, count=loss.count)


def with_parts(workload: Workload, parts: Sequence[str], *, asks_inputs: bool = False) -> Workload:
    """The same with parts of a named model trained alone.

    Args:
        parts: as in `models.trained_parts`; none: all of it.
        asks_inputs: whether gradients flow back to what the embeddings give, trained or not.
    """
    if not parts and not asks_inputs:
        return workload
    return _with_model(workload, parts=tuple(parts), asks_inputs=asks_inputs)


def with_rounding(workload: Workload, rounds: FakeQuantisation | None) -> Workload:
    """The same of a named model that is trained for quantised inference."""
    if rounds is None:
        return workload
    return _with_model(workload, rounds=rounds)


def _with_model(workload: Workload, **changes: Any) -> Workload:
    """The workload of a named model with other fields."""
    model = workload.model
    assert isinstance(model, HuggingFaceModel), "models of functions are as they are"
    model = dataclasses.replace(model, **changes)
    sizes = Sizes(workload.sequence_length, workload.effective_batch_size)
    loss_options = workload.source.get("loss_options")
    changed = _workload(model, None, sizes, model.trust_remote_code, loss_options)

    return dataclasses.replace(changed, loss=workload.loss, count=workload.count)


def _workload(
    model: HuggingFaceModel,
    teacher: tuple[str, str] | None,
    sizes: Sizes,
    trusted: bool,
    loss_options: LossOptions,
) -> Workload:
    """The workload of a model, with the kind and the name of its teacher."""
    if teacher is None:
        workload = huggingface_workload(model, **sizes._asdict(), loss_options=loss_options)
        source = {**workload.source, **model.changed}
        return dataclasses.replace(workload, source=source)

    kind, name = teacher
    if kind == "function":
        raise InputError(f"the teacher {name} is a function, not a named model.", _OTHER_MODELS)
    taught_by = _read(kind, name, model.task, trusted)
    _check_vocabularies(model, taught_by)
    workload = huggingface_workload(
        model,
        **sizes._asdict(),
        frozen={TEACHER: taught_by},
        loss_options=loss_options,
    )
    source = {
        **workload.source,
        **model.changed,
        TEACHER: dict(taught_by.source),
    }

    return dataclasses.replace(workload, source=source)


def _check_vocabularies(model: HuggingFaceModel, teacher: HuggingFaceModel) -> None:
    """Hold the vocabularies of two models against one another.

    Raises:
        InputError: they cannot have the same tokens.
    """
    tokens = model.transformers_config().get_text_config().vocab_size
    its_tokens = teacher.transformers_config().get_text_config().vocab_size
    if abs(tokens - its_tokens) <= _PADDED:
        return

    message = f"{model.name} has {tokens:,} tokens and its teacher {teacher.name} {its_tokens:,}"
    message += ": they have not the same tokenizer."
    raise InputError(message, "Choose a teacher of the same family.")


def named_by(source: Mapping[str, Any]) -> tuple[str, str]:
    """The kind and the name of the model of a `source:`, for which no transformers is loaded.

    Raises:
        InputError: the source is empty, a function or not one that `resolve` writes, or what it
            names is gone.
    """
    if not source:
        message = (
            "this result is of a model that lived in a Python process, and does not say how to make "
            "it again."
        )
        raise InputError(message, "Train it there, with autofit.fit(model, loader, config=...).")

    kind = source.get("kind")
    if not isinstance(kind, str) or kind not in _NAMED_BY:
        raise unknown("kind of model source", kind, _NAMED_BY)

    key = _NAMED_BY[kind]
    name = source.get(key)
    if not isinstance(name, str):
        message = f"the source of the model lacks its {key}: {shown(dict(source))}."
        raise InputError(message, "Search again.")

    if kind == "function":
        message = f"this result is of a model that the function {name} makes"
        message += ", and no file has autofit run code."
        remedy = "Give the model in Python: autofit.fit(model, loader, config=...)."
        raise InputError(message, remedy)

    if kind == "preset" and name not in _pipelines():
        load_preset(name)
    elif kind == "directory" and not is_pipeline(Path(name)):
        check_directory(name)
    elif kind == "hub" and not is_hub_id(name):
        message = f"the source of the model is {shown(name)}"
        message += ", which is no name of a model on the hub."
        raise InputError(message, "Write it as organisation/name, or search again.")

    return kind, name


def _read(
    kind: str,
    name: str,
    task: str | None,
    trusted: bool,
    *,
    sees: bool = False,
) -> HuggingFaceModel:
    """The model of a name of that kind, for a task or, without one, for its own.

    Raises:
        InputError: there is none, or it is not for that task.
    """
    require(isinstance(trusted, bool), "trust_remote_code must be True or False", trusted)
    if sees and task is not None and TASKS[task].of_texts:
        model = _read(kind, name, IMAGE_TEXT_TO_TEXT.name, trusted)
        return dataclasses.replace(model, task=task, sees=True)

    if _is_pipeline(kind, name):
        message = f"{name} is a pipeline of diffusers, which teaches no other model."
        raise InputError(message, _OTHER_MODELS)

    if kind == "directory":
        return read_directory(name, task=task, trust_remote_code=trusted)
    if kind != "preset":
        return read_hub(name, task=task, trust_remote_code=trusted)

    model = preset_model(name)
    if task in (None, model.task):
        return model

    task = chosen_task(model.config, task, f"the preset {name}")
    return dataclasses.replace(model, task=task)


def _existing(model: str) -> Path | None:
    """The path of a file or a directory of that name; None where there is none."""
    if not model:
        return None  # Path("") would be the current directory

    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    # too long for a file name, no such user, a null character
    except (OSError, RuntimeError, ValueError):
        return None

    return None
