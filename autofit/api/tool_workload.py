"""The workload that a tool trains from its file: the model that the file names, or one of its
shape, with what the tool does to it."""

from dataclasses import dataclass, replace
from typing import Any

from autofit.core.config import Config
from autofit.core.environment import versions
from autofit.core.errors import InputError
from autofit.core.knobs.compile import KNOB as COMPILE
from autofit.core.knobs.gradient_accumulation_steps import KNOB as ACCUMULATION
from autofit.core.knobs.kernels import KNOB as KERNELS
from autofit.core.knobs.lora_targets import SETS
from autofit.core.knobs.loss import KNOB as LOSS
from autofit.core.knobs.micro_batch_size import KNOB as MICRO_BATCH
from autofit.core.tasks import TASKS
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.workload import Workload
from autofit.export.exactness import rules_of
from autofit.export.importers.importer import Importer, Keys
from autofit.export.importers.pictures import PicturesOfFile, preset_like
from autofit.export.pictures import pictures_of
from autofit.export.source import WEIGHTS, ExportSource
from autofit.export.tool import Tool
from autofit.models import (
    HuggingFaceModel,
    needs_images,
    pipeline_named,
    resolve,
    with_fields,
    with_loss_of,
    with_rounding,
)
from autofit.models.diffusion.pipeline import (
    DiffusersModel,
    largest_bucket,
    parse_resolution,
)
from autofit.models.huggingface import TILES
from autofit.models.stand_ins import stand_in
from autofit.techniques import all_techniques

SIZES = (MICRO_BATCH.name, ACCUMULATION.name)  # which make the effective batch, with the devices

# What stays where layers round: fused losses multiply by the head's weight without rounding it, and
# what a compiler makes of the many small operations is not predicted.
_BESIDE_ROUNDING = (COMPILE.name, LOSS.name)

# What stays where MLPs are tiled: kernels would take their place, and a compiler would go through
# all tiles.
_BESIDE_TILES = (COMPILE.name, KERNELS.name)

# A file that names its kernels is for an environment that has them.
_THERE = {"flash-attn": "2.8"}


@dataclass(frozen=True)
class TrainedModel:
    """What a file trains.

    Attributes:
        named: the model, as the file or the user names it.
        model: what stands for it, as `search` takes it.
        holds: knobs that stay as they are for what the tool does to the model.
        notes: what was taken for granted, in sentences.
    """

    named: str
    model: str
    workload: Workload
    holds: tuple[str, ...]
    notes: tuple[str, ...]


def trained_by(
    importer: Importer,
    keys: Keys,
    name: str,
    *,
    model: str | None,
    task: str | None,
    seq_len: int | None,
) -> TrainedModel:
    """What a file trains.

    Args:
        name: what errors call the file.
        model, task, seq_len: of the user, in place of what the file says.

    Raises:
        InputError: the file names no model, or one that is not known.
    """
    named = model or _named(importer, keys)
    if not named:
        raise InputError(f"{name} names no {importer.model}.", "Give --model.")
    if importer.pictures is not None:
        return _of_pictures(importer.pictures(keys), named, model=model, task=task, tokens=seq_len)

    tokens = seq_len or importer.sample_tokens(keys)
    task = task or importer.task(keys)
    sees = task == IMAGE_TEXT_TO_TEXT.name or importer.sees(keys)
    stands = named
    notes: list[str] = []
    if model is None:
        stands, note = stand_in(
            named,
            tokens,
            layers=set(str(importer.adapted(keys)).split("+")) - set(SETS),
            task=IMAGE_TEXT_TO_TEXT.name if sees else task,
            stretches=importer.stretches,
        )
        if note:
            notes.append(note)

    sees = sees or needs_images(stands, task)
    workload = resolve(
        stands,
        task=task,
        sequence_length=tokens,
        effective_batch_size=1,
        loss_options=importer.loss_options(keys, TASKS[task]) or None,
        sees=sees,
        stretches=importer.stretches,
    )
    workload, holds = _as_tool_builds(importer, {**keys, importer.model: named}, workload)

    longest = getattr(workload.model, "options", {}).get("max_position_embeddings")
    if longest is not None:
        title = importer.tool.title
        notes.append(f"{title} lets {workload.name} take as many as {longest:,} tokens.")
    if sees:
        what = "sample" if task == IMAGE_TEXT_TO_TEXT.name else "text"
        notes.append(f"each {what} is taken to be an image and text, {tokens:,} tokens together.")
    return TrainedModel(named, stands, workload, holds, tuple(notes))


def _of_pictures(
    found: PicturesOfFile,
    named: str,
    *,
    model: str | None,
    task: str | None,
    tokens: int | None,
) -> TrainedModel:
    """The denoiser that a file trains; raises as `trained_by`."""
    stands, note = named, None
    if model is None:
        stands, note = preset_like(named, found.family)

    resolution = found.resolution
    if resolution is not None:
        width, height = largest_bucket(pipeline_named(stands), *parse_resolution(resolution))
        resolution = f"{width}x{height}"

    workload = resolve(
        stands,
        task=task or DIFFUSION.name,
        sequence_length=tokens or found.prompt_tokens,
        effective_batch_size=1,
        resolution=resolution,
        frames=found.frames,
        train_text_encoders=found.trains_text_encoders,
    )
    # What is cached and what is not, the importer's notes say.
    workload = replace(workload, notes=())
    return TrainedModel(named, stands, workload, (), (note,) if note else ())


def for_tool(workload: Workload, tool: Tool, device: str) -> Workload:
    """The workload as a tool trains it, and only by configs that it runs exactly as measured.

    Raises:
        InputError: the tool does not train this task.
    """
    workload = with_own_loss(workload, tool, device)
    source = replace(
        source_of(workload, WEIGHTS, device),
        versions=versions(),
        packing=workload.packing,
        apart=bool(workload.document_tokens),
    )
    return replace(workload, tool=tool.name, rules=rules_of(tool, workload, source))


def with_own_loss(workload: Workload, tool: Tool, device: str) -> Workload:
    """The workload with the loss that a tool computes in place of the model's, where it does."""
    if not tool.has_own_loss(device, workload.task):
        return workload
    return with_loss_of(workload, tool.name)


def source_of(workload: Workload, weights: str, device: str) -> ExportSource:
    """A model as exporters take it, with every knob off.

    Args:
        weights: what the tool loads.
    """
    off = {technique.name: technique.off for technique in all_techniques()}
    pictures = None
    if isinstance(workload.model, DiffusersModel):
        pictures = pictures_of(workload.model, workload.source)

    return ExportSource(
        model=workload.name,
        config=Config({**off, **dict.fromkeys(SIZES, 1)}),
        hardware={"device": device},
        task=workload.task,
        sequence_length=workload.sequence_length,
        weights=weights,
        versions=_THERE,
        off=off,
        own_loss=getattr(workload.loss, "tool", None),
        pictures=pictures,
    )


def _named(importer: Importer, keys: Keys) -> str:
    """The model that a file names, or nothing."""
    of_file: Any = keys.get(importer.model)
    return of_file if isinstance(of_file, str) else ""


def _as_tool_builds(
    importer: Importer, keys: Keys, workload: Workload
) -> tuple[Workload, tuple[str, ...]]:
    """The workload with the model as the tool builds it, and the knobs that stay for that."""
    model = workload.model
    if not isinstance(model, HuggingFaceModel):
        return workload, ()

    holds: tuple[str, ...] = ()
    fields = importer.fields(keys, TASKS[workload.task], model.config)
    workload = with_fields(workload, **fields)
    if fields.get(TILES):
        holds += _BESIDE_TILES

    rounds = importer.rounds(keys)
    if rounds is not None:
        workload = with_rounding(workload, rounds)
        holds += _BESIDE_ROUNDING
    return workload, holds
