"""A file or a command of another tool, read: what it trains, on how many devices, and by which
config."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autofit.api.tool_workload import SIZES, source_of, trained_by, with_own_loss
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, require
from autofit.core.files import expanded, read_text
from autofit.core.hardware import Hardware
from autofit.core.knobs import knob_named
from autofit.core.knobs.lora_targets import SETS
from autofit.core.layout import Layout
from autofit.core.options import check_devices
from autofit.core.tasks import TASK_NAMES
from autofit.core.workload import REFERENCE, Workload, check_sizes
from autofit.export.adapted_layers import (
    matched_layers,
    named_layers,
    reading_layers,
    usual_layers,
)
from autofit.export.from_result import layer_names
from autofit.export.importers import document_of, importer_of
from autofit.export.importers.command_line import CommandLine, command_text
from autofit.export.importers.division import Division
from autofit.export.importers.document import Document
from autofit.export.importers.frozen import Weights
from autofit.export.importers.importer import Importer, Keys, config_of
from autofit.export.importers.known_keys import note_on_unknown
from autofit.export.importers.toml_document import TomlDocument
from autofit.export.source import ExportSource
from autofit.models import HuggingFaceModel, with_parts
from autofit.models.trained_parts import parts_of
from autofit.techniques import all_techniques

_MOST_BYTES = 2**20  # of a file


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
    document: Document | TomlDocument | CommandLine
    importer: Importer
    model: str
    workload: Workload
    before: ExportSource
    division: Division
    there: Hardware
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """What is said of the file."""
        return self.path.name if self.path else "the command"


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
        DevicesMissingError: it divides over devices, and how many is not known; InputError: the
            file is none of a known tool, or cannot be tuned.
    """
    is_name = isinstance(model, str) and model != ""
    require(model is None or is_name, "the model must be a name", model)
    check_sizes(seq_len, 1)
    require(task is None or task in TASK_NAMES, "the task must be one that autofit knows", task)
    check_devices(devices, nodes)

    path, name, document = _document(file)
    importer = importer_of(document.keys, name)
    importer.check(document.keys)
    if reason := importer.refuse(document.keys):
        raise InputError(f"{name} cannot be tuned: {reason}", "See docs/tune.md.")

    folder = path.parent if path else Path()
    keys = {**document.keys, **importer.beside(document.keys, folder)}
    document = replace(document, keys=keys)
    division = _division(importer, keys, folder, name)
    there = _devices(name, division, device, devices, nodes)
    division = replace(division, devices=there.devices, nodes=there.nodes)

    trained = trained_by(importer, keys, name, model=model, task=task, seq_len=seq_len)
    workload = with_own_loss(trained.workload, importer.tool, device)
    division = replace(division, holds=(*division.holds, *trained.holds))

    source = source_of(workload, trained.named, device)
    config = config_of(importer, keys, source, choices_of_knobs(), division)
    notes = [*trained.notes]
    if config.lora_rank:
        config, missing = _adapted(importer, keys, config, workload)
        if missing:
            names = ", ".join(missing)
            notes.append(f"{workload.name} has no layers named {names}: none get adapters.")
    else:
        workload, of_parts, holds = _frozen(importer, keys, workload)
        notes += of_parts
        division = replace(division, holds=(*division.holds, *holds))

    config = _on_devices(name, config, workload, there)
    notes += importer.notes({**keys, importer.model: trained.named})
    notes += division.notes
    of_tool = [key for key in keys if key not in importer.of_script]
    unknown = note_on_unknown(importer.tool.name, of_tool)
    if unknown is not None:
        notes.append(unknown)
    return Reading(
        path=path,
        document=document,
        importer=importer,
        model=trained.model,
        workload=workload,
        before=_before(source, config, workload),
        division=division,
        there=there,
        notes=tuple(notes),
    )


def _document(
    file: str | Path | Sequence[str],
) -> tuple[Path | None, str, Document | TomlDocument | CommandLine]:
    """Where a file is, what errors call it, and what it says; a command is nowhere."""
    if isinstance(file, str | Path):
        path = expanded(file, "file")
        return path, path.name, document_of(_text(path), path.name)

    is_command = isinstance(file, list | tuple) and all(isinstance(word, str) for word in file)
    require(is_command, "the file must be a path, or the words of a command", file)
    name = "the command"
    return None, name, document_of(command_text(file), name, is_command=True)


def _division(importer: Importer, keys: Keys, folder: Path, name: str) -> Division:
    """How a file divides the training over devices; `name` is what errors call it."""
    try:
        return importer.divide(keys, folder)
    except InputError as error:
        message = f"{name} cannot be tuned: {error.message}"
        raise InputError(message, error.remedy) from error


def _before(source: ExportSource, config: Config, workload: Workload) -> ExportSource:
    """The file's config, with the effective batch that its sizes make."""
    if REFERENCE in workload.frozen and config.reference is None:
        # As all of these tools do it.
        reference = "adapter-off" if config.lora_rank else "resident"
        config = config.replace(reference=reference)

    effective = Layout.of(config).dp_degree
    for size in SIZES:
        effective *= int(config[size] or 1)
    return as_read(replace(source, effective_batch_size=effective), config, workload)


def _adapted(
    importer: Importer, keys: Keys, config: Config, workload: Workload
) -> tuple[Config, Sequence[str]]:
    """The config with the layers that the tool puts adapters beside, and the names without a
    layer."""
    missing: Sequence[str] = ()
    targets: Value = config.lora_targets
    experts = importer.adapted_experts(keys)
    pattern = importer.pattern(keys)
    if pattern is not None:
        targets = matched_layers(workload.model, pattern)
    elif importer.takes_usual and not importer.has(keys, importer.targets):
        targets = "" if experts else "+".join(usual_layers(workload.model))
    elif targets not in SETS:
        targets, missing = named_layers(workload.model, str(targets).split("+"))
    elif importer.freezes_vision:
        targets = reading_layers(workload.model) or targets

    if experts:
        found, without = named_layers(workload.model, experts)
        targets = f"{targets}+{found}" if targets else found
        missing = (*missing, *without)
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

    trained_numbers = sum(weights.sizes[name] for name in trained.names)
    share = trained_numbers / sum(weights.sizes.values())
    note = f"{share:.0%} of the weights are trained, and the rest stays as it is."
    parts = parts_of(trained.names, list(weights.sizes))
    frozen = with_parts(workload, parts, asks_inputs=trained.asks_inputs)
    return frozen, (note, *trained.notes), trained.holds


def _text(path: Path) -> str:
    try:
        return read_text(path, most=_MOST_BYTES, newline="")
    except FileNotFoundError as error:
        raise InputError(f"the file {path} is not there.", "Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text.", "Give a file of text.") from error


def _devices(name: str, division: Division, device: str, given: int | None, nodes: int) -> Hardware:
    """What a file is tuned for, as far as the numbers of devices and machines go.

    Args:
        name: what errors call the file.
        given, nodes: by the user; one machine is as good as none said.
    """
    _check_same(name, "devices", given, division.devices)
    if nodes > 1 and division.nodes != 1:
        _check_same(name, "nodes", nodes, division.nodes)

    machines = nodes if nodes > 1 else division.nodes
    if machines is None:
        message = f"{name} is for several machines, and does not say how many."
        raise DevicesMissingError(message, "Give --nodes N.")
    found = given or division.devices
    if found is None and division.knobs:
        degrees = [value for value in division.knobs.values() if type(value) is int]
        raise _devices_missing(name, math.prod(degrees))

    there = Hardware(device, "", 0, 0, 0, 1, devices=found or 1, nodes=machines, here=False)
    if there.world == 1 and division.knobs:
        message = f"{name} divides over devices, and one was given."
        raise InputError(message, "Give --devices 2, or take FSDP and DeepSpeed out of the file.")
    return there


def _check_same(name: str, what: str, given: int | None, of_file: int | None) -> None:
    """Refuse another number than the file's, where both are known."""
    if given is None or of_file is None or given == of_file:
        return
    message = f"{name} is for {of_file} {what}, and --{what} says {given}."
    raise InputError(message, f"Leave --{what} out, or correct the file.")


def _devices_missing(name: str, multiple: int) -> DevicesMissingError:
    """The error of a file that divides over devices, a multiple of so many, and names no number."""
    remedy = "Give --devices N."
    if multiple > 1:
        remedy = f"Give --devices N, a multiple of {multiple}."
    error = DevicesMissingError(f"{name} divides over devices, and does not say how many.", remedy)
    error.multiple = multiple
    return error


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
