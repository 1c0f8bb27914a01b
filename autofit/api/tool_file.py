"""A file or a command of another tool, read: what it trains, on how many devices, and by which config."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autofit.core.config import Config, Value
from autofit.core.environment import versions
from autofit.core.errors import InputError, require
from autofit.core.files import expanded, read_text
from autofit.core.hardware import Hardware
from autofit.core.knobs import knob_named
from autofit.core.knobs.compile import KNOB as COMPILE
from autofit.core.knobs.gradient_accumulation_steps import KNOB as ACCUMULATION
from autofit.core.knobs.kernels import KNOB as KERNELS
from autofit.core.knobs.lora_targets import SETS
from autofit.core.knobs.loss import KNOB as LOSS
from autofit.core.knobs.micro_batch_size import KNOB as MICRO_BATCH
from autofit.core.layout import Layout
from autofit.core.options import check_devices
from autofit.core.tasks import TASK_NAMES, TASKS
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.workload import REFERENCE, Workload, check_sizes
from autofit.export.adapted_layers import matched_layers, named_layers, reading_layers
from autofit.export.exactness import rules_of
from autofit.export.from_result import layer_names
from autofit.export.importers import document_of, importer_of
from autofit.export.importers.command_line import CommandLine, command_text
from autofit.export.importers.division import Division
from autofit.export.importers.document import Document
from autofit.export.importers.frozen import Weights
from autofit.export.importers.importer import (
    Importer,
    Keys,
    config_of,
)
from autofit.export.source import WEIGHTS, ExportSource
from autofit.export.tool import Tool
from autofit.models import (
    HuggingFaceModel,
    needs_images,
    resolve,
    with_fields,
    with_loss_of,
    with_parts,
    with_rounding,
)
from autofit.models.huggingface import TILES
from autofit.models.stand_ins import stand_in
from autofit.models.trained_parts import parts_of
from autofit.techniques import all_techniques

_MOST_BYTES = 2**20  # of a file
SIZES = (MICRO_BATCH.name, ACCUMULATION.name)  # which make the effective batch, with the devices
# What stays where layers round: fused losses multiply by the head's weight without rounding it, and
# what a compiler makes of the many small operations is not predicted.
_BESIDE_ROUNDING = (COMPILE.name, LOSS.name)
# What stays where MLPs are tiled: kernels would take their place, and a compiler would go through all tiles.
_BESIDE_TILES = (COMPILE.name, KERNELS.name)
# A file that names its kernels is for an environment that has them.
_THERE = {"flash-attn": "2.8"}


class DevicesMissingError(InputError):
    """A file divides a training over devices, and does not say how many.

    Attributes:
        multiple: of how many they must be.
    """

    multiple = 1


@dataclass(frozen=True)
class Reading:
    """A file of another tool: what it trains, and by which config.

    Attributes:
        path: None of a command.
        model: what is given to `search` for it.
        before: the config, as the tool's exporter takes it.
        division: how the file divides the training over devices, and `there` how many those are.
    """

    path: Path | None
    document: Document | CommandLine
    importer: Importer
    model: str
    workload: Workload
    before: ExportSource
    division: Division
    there: Hardware
    notes: tuple[str, ...]


def read(
    file: str | Path | Sequence[str],
    *,
    model: str | None = None,
    task: str | None = None,
    seq_len: int | None = None,
    device: str = "cuda",
    devices: int | None = None,
    nodes: int = 1,
) -> Reading:
    """What a file of another tool trains, and by which config.

    Args:
        file, model, task, seq_len, devices, nodes: as of `tune`; `device`: what it is for.

    Raises:
        DevicesMissingError: it divides over devices, and how many is not known; InputError: the file is
            none of a known tool, or cannot be tuned.
    """
    is_name = isinstance(model, str) and model != ""
    require(model is None or is_name, "the model must be a name", model)
    check_sizes(seq_len, 1)
    require(task is None or task in TASK_NAMES, "the task must be one that autofit knows", task)
    check_devices(devices, nodes)

    path, name, document = _document(file)
    keys = document.keys
    importer = importer_of(keys, name)
    importer.check(keys)
    if reason := importer.refuse(keys):
        raise InputError(f"{name} cannot be tuned: {reason}", "See docs/tune.md.")
    try:
        division = importer.divide(keys, path.parent if path else Path())
    except InputError as error:
        message = f"{name} cannot be tuned: {error.message}"
        raise InputError(message, error.remedy) from error
    there = _devices(name, division, device, devices, nodes)
    division = replace(division, devices=there.devices, nodes=there.nodes)

    of_file = keys.get(importer.model)
    named = model or (of_file if isinstance(of_file, str) else "")
    if not named:
        raise InputError(f"{name} names no {importer.model}.", "Give --model.")
    tokens = seq_len or importer.sample_tokens(keys)
    task = task or importer.task(keys)
    stands, note = named, None
    layers = set(str(importer.adapted(keys)).split("+")) - set(SETS)
    sees = task == IMAGE_TEXT_TO_TEXT.name or importer.sees(keys)
    if model is None:
        of_kind = IMAGE_TEXT_TO_TEXT.name if sees else task
        stands, note = stand_in(
            named, tokens, layers=layers, task=of_kind, stretches=importer.stretches
        )
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
    if isinstance(workload.model, HuggingFaceModel):
        of_model = {**keys, importer.model: named}
        fields = importer.fields(of_model, TASKS[task], workload.model.config)
        workload = with_fields(workload, **fields)
        if fields.get(TILES):
            division = replace(division, holds=(*division.holds, *_BESIDE_TILES))
    rounds = importer.rounds(keys)
    if rounds is not None and isinstance(workload.model, HuggingFaceModel):
        workload = with_rounding(workload, rounds)
        division = replace(division, holds=(*division.holds, *_BESIDE_ROUNDING))
    workload = with_own_loss(workload, importer.tool, device)
    source = _source(workload, named, device)
    config = config_of(importer, keys, source, choices_of_knobs(), division)
    missing: Sequence[str] = ()
    of_parts: Sequence[str] = ()
    if config.lora_rank:
        config, missing = _adapted(importer, keys, config, workload)
    else:
        workload, of_parts, holds = _frozen(importer, keys, workload)
        division = replace(division, holds=(*division.holds, *holds))
    config = _on_devices(name, config, workload, there)
    before = _before(source, config, workload)

    notes = [note] if note else []
    if missing:
        notes.append(
            f"{workload.name} has no layers named {', '.join(missing)}: none get adapters."
        )
    longest = getattr(workload.model, "options", {}).get("max_position_embeddings")
    if longest is not None:
        notes.append(
            f"{importer.tool.title} lets {workload.name} take as many as {longest:,} tokens."
        )
    if sees:
        what = "sample" if task == IMAGE_TEXT_TO_TEXT.name else "text"
        notes.append(f"each {what} is taken to be an image and text, {tokens:,} tokens together.")
    notes += [*of_parts, *importer.notes({**keys, importer.model: named}), *division.notes]
    return Reading(
        path, document, importer, stands, workload, before, division, there, tuple(notes)
    )


def for_tool(workload: Workload, tool: Tool, device: str) -> Workload:
    """The workload as a tool trains it, and only by configs that it runs exactly as measured.

    Raises:
        InputError: the tool does not train this task.
    """
    workload = with_own_loss(workload, tool, device)
    source = replace(
        _source(workload, WEIGHTS, device),
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


def _document(
    file: str | Path | Sequence[str],
) -> tuple[Path | None, str, Document | CommandLine]:
    """Where a file is, what errors call it, and what it says; a command is nowhere."""
    if isinstance(file, str | Path):
        path = expanded(file, "file")
        return path, path.name, document_of(_text(path), path.name)

    is_command = isinstance(file, list | tuple) and all(isinstance(word, str) for word in file)
    require(is_command, "the file must be a path, or the words of a command", file)
    name = "the command"
    return None, name, document_of(command_text(file), name, is_command=True)


def _before(source: ExportSource, config: Config, workload: Workload) -> ExportSource:
    """The file's config, with the effective batch that its sizes make."""
    if REFERENCE in workload.frozen and config.reference is None:
        # as all of these tools do it
        config = config.replace(reference="adapter-off" if config.lora_rank else "resident")
    effective = Layout.of(config).dp_degree
    for size in SIZES:
        effective *= int(config[size] or 1)
    return as_read(replace(source, effective_batch_size=effective), config, workload)


def _adapted(
    importer: Importer, keys: Keys, config: Config, workload: Workload
) -> tuple[Config, Sequence[str]]:
    """The config with the layers that the tool puts adapters beside, and the names without a layer."""
    missing: Sequence[str] = ()
    targets: Value = config.lora_targets
    pattern = importer.pattern(keys)
    if pattern is not None:
        targets = matched_layers(workload.model, pattern)
    elif targets not in SETS:
        targets, missing = named_layers(workload.model, str(targets).split("+"))
    elif importer.freezes_vision:
        targets = reading_layers(workload.model) or targets
    return config.replace(lora_targets=targets), missing


def _frozen(
    importer: Importer, keys: Keys, workload: Workload
) -> tuple[Workload, Sequence[str], Sequence[str]]:
    """The workload that trains what the tool trains without adapters, notes on it, and the knobs
    that stay for it."""
    model = workload.model
    if not isinstance(model, HuggingFaceModel):
        return workload, (), ()  # a function's, which freezes what it wants

    weights = Weights(model, {**model.config, **model.options})
    trained = importer.trains(keys, weights)
    if trained is None:
        return workload, (), ()
    if len(trained.names) == len(weights.sizes):
        return workload, trained.notes, ()

    parts = parts_of(trained.names, list(weights.sizes))
    share = sum(weights.sizes[name] for name in trained.names) / sum(weights.sizes.values())
    note = f"{share:.0%} of the weights are trained, and the rest stays as it is."
    frozen = with_parts(workload, parts, asks_inputs=trained.asks_inputs)
    return frozen, (note, *trained.notes), trained.holds


def _text(path: Path) -> str:
    try:
        return read_text(path, most=_MOST_BYTES, newline="")
    except FileNotFoundError as error:
        raise InputError(f"the file {path} is not there.", "Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text.", "Give a YAML file.") from error


def _devices(name: str, division: Division, device: str, given: int | None, nodes: int) -> Hardware:
    """What a file is tuned for, as far as the numbers of devices and machines go.

    Args:
        name: what errors call the file.
        given, nodes: by the user; one machine is as good as none said.
    """
    of_machines = tuple(None if number == 1 else number for number in (nodes, division.nodes))
    for what, (said, of_file) in {
        "devices": (given, division.devices),
        "nodes": of_machines,
    }.items():
        if None not in (said, of_file) and said != of_file:
            message = f"{name} is for {of_file} {what}, and --{what} says {said}."
            raise InputError(message, f"Leave --{what} out, or correct the file.")

    machines = nodes if nodes > 1 else division.nodes
    if machines is None:
        message = f"{name} is for several machines, and does not say how many."
        raise DevicesMissingError(message, "Give --nodes N.")
    found = given or division.devices
    if found is None and division.knobs:
        message = f"{name} divides over devices, and does not say how many."
        multiple = math.prod(
            value for value in division.knobs.values() if type(value) is int and value > 1
        )
        remedy = (
            f"Give --devices N, a multiple of {multiple}." if multiple > 1 else "Give --devices N."
        )
        error = DevicesMissingError(message, remedy)
        error.multiple = multiple
        raise error

    there = Hardware(device, "", 0, 0, 0, 1, devices=found or 1, nodes=machines, here=False)
    if there.world == 1 and division.knobs:
        message = f"{name} divides over devices, and one was given."
        raise InputError(message, "Give --devices 2, or take FSDP and DeepSpeed out of the file.")
    return there


def _on_devices(name: str, config: Config, workload: Workload, there: Hardware) -> Config:
    """A config with what follows for each knob of several devices; `name` is the file's.

    Raises:
        InputError: they do not divide the devices, or cannot be beside the others.
    """
    ways = [technique for technique in all_techniques() if knob_named(technique.name).of_devices]
    for way in ways:
        config = config.replace(**{way.name: way.canonicalize(config, workload, there)})
    for way in ways:
        if reason := way.refuse(config, workload, there):
            raise InputError(f"{name} cannot be tuned: {way.name}: {reason}", "See docs/tune.md.")
    return config


def _source(workload: Workload, weights: str, device: str) -> ExportSource:
    """The model of a file, with every knob off."""
    off = {technique.name: technique.off for technique in all_techniques()}
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
    )


def as_read(source: ExportSource, config: Config, workload: Workload) -> ExportSource:
    """The same with a config, and with the names of the layers that it adapts."""
    names = layer_names(workload.model, config, workload.task)
    return replace(source, config=config, **names)


def choices_of_knobs() -> dict[str, tuple[Value, ...]]:
    """The values of every knob that is no number."""
    found = {}
    for technique in all_techniques():
        values = technique.values
        if values and technique.name not in SIZES:
            found[technique.name] = tuple(dict.fromkeys((technique.off, *values)))
    return found
