"""`autofit.tune`: the file of another tool, with what only costs chosen for a card, and nothing else
in it changed."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.api.estimate import predict
from autofit.api.search import search
from autofit.api.worth import Gain, worth_changing
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, NothingFitsError, RefusedError, require
from autofit.core.estimate import Estimate
from autofit.core.events import Listener
from autofit.core.files import expanded, read_text, write_atomically
from autofit.core.hardware import Hardware
from autofit.core.knobs import knob_named
from autofit.core.knobs.gradient_accumulation_steps import KNOB as ACCUMULATION
from autofit.core.knobs.lora_targets import SETS
from autofit.core.knobs.micro_batch_size import KNOB as MICRO_BATCH
from autofit.core.layout import Layout
from autofit.core.options import check_devices
from autofit.core.result import Result
from autofit.core.tasks import TASK_NAMES
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.workload import REFERENCE, Workload, check_sizes
from autofit.export.adapted_layers import matched_layers, named_layers, reading_layers
from autofit.export.from_result import layer_names
from autofit.export.importers import document_of, importer_of
from autofit.export.importers.command_line import CommandLine, command_text
from autofit.export.importers.division import Division
from autofit.export.importers.document import Document, flat
from autofit.export.importers.importer import (
    Importer,
    Keys,
    can_become,
    changes,
    config_of,
)
from autofit.export.source import ExportSource
from autofit.export.tool import write
from autofit.models import resolve
from autofit.models.stand_ins import stand_in
from autofit.techniques import all_techniques

_MOST_BYTES = 2**20  # of a file
_SIZES = (MICRO_BATCH.name, ACCUMULATION.name)
# A file that names its kernels is for an environment that has them.
_THERE = {"flash-attn": "2.8"}


class DevicesMissingError(InputError):
    """A file divides a training over devices, and does not say how many."""


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


@dataclass(frozen=True)
class Tuned:
    """A file of another tool, before and after.

    Attributes:
        path: None of a command.
        tool: what the tool is called.
        changes: the keys that say something else now, with their values.
        before, after: what is predicted of both; None where it cannot be.
        gains: what changes bring, by prediction; none where the search measured.
        result: the search.
    """

    path: Path | None
    tool: str
    original: str
    text: str
    changes: Mapping[str, Any]
    before: Estimate | None
    after: Estimate | None
    gains: tuple[Gain, ...]
    result: Result
    notes: tuple[str, ...]

    @property
    def diff(self) -> str:
        """What changes, as `diff -u` says it."""
        lines = difflib.unified_diff(
            self.original.splitlines(keepends=True),
            self.text.splitlines(keepends=True),
            self.path.name if self.path else "command",
            tuned_path(self.path).name if self.path else "tuned command",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """The object of `autofit tune --json`."""
        return {
            "schema": 1,
            "tool": self.tool,
            "changes": dict(self.changes),
            "before": self.before and self.before.to_predicted(),
            "after": self.after and self.after.to_predicted(),
            "gains": [dataclasses.asdict(gain) for gain in self.gains],
            "config": dict(self.result.config or {}),
            "notes": list(self.notes),
            "text": self.text,
        }


def tuned_path(path: Path) -> Path:
    """Where the tuned file is written beside its original: axolotl.tuned.yaml."""
    return path.with_name(f"{path.stem}.tuned{path.suffix}")


def tune(
    file: str | Path | Sequence[str],
    *,
    model: str | None = None,
    task: str | None = None,
    seq_len: int | None = None,
    keep: Sequence[str] = (),
    free: Sequence[str] = (),
    devices: int | None = None,
    nodes: int = 1,
    listener: Listener | None = None,
    **options: Any,
) -> Tuned:
    """Choose what only costs in a file of axolotl, LLaMA-Factory, TRL or ms-swift: micro-batch, accumulation,
    checkpointing, offloading, attention, kernels, compiling. What is learnt stays as it is.

    Nothing is written: `Tuned.text` is the new file.

    Args:
        file: what the tool trains by: a YAML file, a shell script with one command, or the words of
            a command, such as ["swift", "sft", "--model", ...].
        model: a preset or a directory, in place of the model that the file names.
        task: what is trained, where the file does not say it (TRL's).
        seq_len: tokens of a sample, in place of what the file says; transformers' say none.
        keep: keys of the file that stay, though they only cost.
        free: keys of the file that may change, though something else is learnt then.
        devices: how many of a machine train together; default: as many as the file says.
        nodes: machines; 1: as many as the file says, else one.
        options: as of `search`: gpu_mem, gpu, device, mem, trials, time_limit, ...

    Raises:
        InputError: the file cannot be tuned, or an argument is wrong; NothingFitsError: no config
            fits that learns the same.
    """
    for name, given in {"keep": keep, "free": free}.items():
        is_list = isinstance(given, list | tuple) and all(isinstance(key, str) for key in given)
        require(is_list, f"{name} must be a list of keys", given)
    device = str(options.get("device") or "cuda")
    found = read(
        file,
        model=model,
        task=task,
        seq_len=seq_len,
        device=device,
        devices=devices,
        nodes=nodes,
    )
    importer, document, workload = found.importer, found.document, found.workload
    before = found.before
    kept = (*keep, *importer.keeps(document.keys))
    settings = _settings(found, kept, free)
    options = {**options, "devices": found.there.devices, "nodes": found.there.nodes}
    result = search(
        found.model,
        task=workload.task,
        seq_len=workload.sequence_length,
        effective_batch=before.effective_batch_size,
        listener=listener,
        space="everything",
        set=settings,
        **options,
    )
    if result.config is None:
        name = found.path.name if found.path else "the command"
        message = f"no config that learns what {name} says is predicted to fit."
        raise NothingFitsError(
            message, "Free a key with --free, such as optimizer, or take a larger card."
        )

    after = _as_read(before, Config({**before.config, **result.config}), workload)
    names = ("gpu", "gpu_mem", "device", "mem", "devices", "nodes", "link")
    card = {name: options[name] for name in names if options.get(name)}
    usable = result.budget.cap_bytes(result.hardware.device)

    def seconds(source: ExportSource) -> float | None:
        estimate = _predicted(workload, source, card)
        fits = estimate is not None and estimate.high <= usable
        return estimate.step_seconds if estimate and fits else None

    is_open = {knob for knob in after.config if len(settings.get(knob, ())) != 1}
    after = _as_tool_reads(found, after, is_open)
    gains: tuple[Gain, ...] = ()
    if result.best is None:  # what was measured stays as it was
        after, gains = worth_changing(importer, document.keys, before, after, seconds)
    changed = changes(importer, document.keys, before, after, is_open)
    predicted = [_predicted(workload, each, card) for each in (before, after)]
    return Tuned(
        path=found.path,
        tool=importer.tool.title,
        original=document.text,
        text=document.changed(changed),
        changes=changed,
        before=predicted[0],
        after=predicted[1],
        gains=tuple(gain.among(changed) for gain in gains),
        result=result,
        notes=found.notes,
    )


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
    path: Path | None
    is_command = isinstance(file, list | tuple) and all(isinstance(word, str) for word in file)
    require(isinstance(file, str | Path) or is_command, "the file must be a path", file)
    is_name = isinstance(model, str) and model != ""
    require(model is None or is_name, "the model must be a name", model)
    check_sizes(seq_len, 1)
    require(task is None or task in TASK_NAMES, "the task must be one that autofit knows", task)
    check_devices(devices, nodes)

    if isinstance(file, str | Path):
        found = expanded(file, "file")
        path, name, text = found, found.name, _text(found)
    else:
        path, name, text = None, "the command", command_text(file)
    document = document_of(text, name, is_command=path is None)
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
    division = dataclasses.replace(division, devices=there.devices, nodes=there.nodes)

    named = model or str(keys.get(importer.model) or "")
    if not named:
        raise InputError(f"{name} names no {importer.model}.", "Give --model.")
    tokens = seq_len or importer.sample_tokens(keys)
    task = task or importer.task(keys)
    stands, note = named, None
    layers = set(str(importer.adapted(keys)).split("+")) - set(SETS)
    if model is None:
        stands, note = stand_in(named, tokens, layers=layers, task=task)
    workload = resolve(
        stands,
        task=task,
        sequence_length=tokens,
        effective_batch_size=1,
    )
    source = _source(workload, named, device)
    config = config_of(importer, keys, source, _choices(), division)
    missing: Sequence[str] = ()
    if config.lora_rank:
        config, missing = _adapted(importer, keys, config, workload)
    config = _on_devices(name, config, workload, there)
    if REFERENCE in workload.frozen and config.reference is None:
        # as all of these tools do it
        config = config.replace(reference="adapter-off" if config.lora_rank else "resident")
    effective = Layout.of(config).dp_degree
    for size in _SIZES:
        effective *= int(config[size] or 1)
    source = dataclasses.replace(source, effective_batch_size=effective)
    before = _as_read(source, config, workload)
    notes = [note] if note else []
    if missing:
        notes.append(
            f"{workload.name} has no layers named {', '.join(missing)}: none get adapters."
        )
    if task == IMAGE_TEXT_TO_TEXT.name:
        notes.append(f"each sample is taken to be an image and text, {tokens:,} tokens together.")
    notes += division.notes
    return Reading(
        path, document, importer, stands, workload, before, division, there, tuple(notes)
    )


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


def save(tuned: Tuned, output: Path | None = None, *, in_place: bool = False) -> Path:
    """Write the tuned file: beside its original, over it, or elsewhere; returns where."""
    path = output
    if tuned.path is not None and path is None:
        path = tuned.path if in_place else tuned_path(tuned.path)
    if path is None:
        raise InputError("a command is in no file that could be written.", "Give an output.")
    try:
        write_atomically(path, tuned.text)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}."
        raise InputError(message, "Choose another --output.") from error
    return path


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
        raise DevicesMissingError(message, "Give --devices N.")

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
        config=Config({**off, **dict.fromkeys(_SIZES, 1)}),
        hardware={"device": device},
        task=workload.task,
        sequence_length=workload.sequence_length,
        weights=weights,
        versions=_THERE,
        off=off,
    )


def _as_read(source: ExportSource, config: Config, workload: Workload) -> ExportSource:
    """The same with a config, and with the names of the layers that it adapts."""
    names = layer_names(workload.model, config, workload.task)
    return dataclasses.replace(source, config=config, **names)


def _as_tool_reads(found: Reading, after: ExportSource, is_open: Collection[str]) -> ExportSource:
    """What the tool makes of a changed file: one key may switch on more than the search asked for."""
    keys = found.document.keys
    changed = changes(found.importer, keys, found.before, after, is_open)
    off = dataclasses.replace(after, config=Config({**after.off, **dict.fromkeys(_SIZES, 1)}))
    reread = config_of(found.importer, {**keys, **flat(changed)}, off, _choices(), found.division)
    values = {
        knob: reread[knob]
        for knob in is_open
        if knob not in _SIZES and not knob_named(knob).of_devices
    }
    return _as_read(after, after.config.replace(**values), found.workload)


def _choices() -> dict[str, tuple[Value, ...]]:
    """The values of every knob that is no number."""
    found = {}
    for technique in all_techniques():
        values = technique.values
        if values and technique.name not in _SIZES:
            found[technique.name] = tuple(dict.fromkeys((technique.off, *values)))
    return found


def _settings(
    found: Reading, keep: Sequence[str], free: Sequence[str]
) -> dict[str, tuple[Value, ...]]:
    """The values that each knob may take: where only the cost changes, all that the tool trains
    exactly; else the one of the file."""
    importer, source, division = found.importer, found.before, found.division
    knob_of: dict[str, str] = {}
    for knob in importer.tool.knobs:
        if knob not in source.config or not _has_key(knob, division):
            continue
        for key in _keys_of(importer, source, knob):
            knob_of.setdefault(importer.name_of(found.document.keys, key), knob)
    for key in (*keep, *free):
        if key not in knob_of:
            raise InputError(
                f"{key} is no key that autofit tunes.", f"It knows {', '.join(knob_of)}."
            )
    kept = {knob_of[key] for key in keep} | set(division.holds)
    freed = {knob_of[key] for key in free}
    # the degrees follow from whether weights are divided, and are open where that is
    degrees_follow = found.there.world > 1 and division.open_layout not in (None, *kept)

    settings: dict[str, tuple[Value, ...]] = {}
    choices = _choices()
    for technique in all_techniques():
        knob = technique.name
        value = source.config[knob]
        of_devices = knob_named(knob).of_devices
        if knob in _SIZES:
            if knob in kept:
                settings[knob] = (value,)
            continue
        is_unset = value is None and technique.off is None and knob not in freed
        if is_unset or knob_named(knob).derived:
            continue  # it follows from others
        if of_devices and degrees_follow and knob != division.open_layout:
            continue

        allowed = [value]
        is_open = knob in importer.tool.knobs and knob not in kept
        if of_devices:
            is_open = is_open and knob in division.open
        for other in choices.get(knob, ()) if is_open else ():
            same = technique.exact(value, found.workload) and technique.exact(other, found.workload)
            if other == value or not (same or knob in freed):
                continue
            if of_devices and other is None:
                continue
            if other not in division.only.get(knob, (other,)):
                continue
            if can_become(importer, source, knob, other):
                allowed.append(other)
        settings[knob] = tuple(allowed)
    return settings


def _has_key(knob: str, division: Division) -> bool:
    """Whether the file can say another value of a knob; of several devices it often cannot."""
    if not knob_named(knob).of_devices:
        return True
    return knob in division.open or division.open_layout is not None


def _keys_of(importer: Importer, source: ExportSource, knob: str) -> list[str]:
    """The keys of a file that a knob decides."""
    return list(write(importer.tool, source).keys.get(knob, {}))


def _predicted(
    workload: Workload, source: ExportSource, card: Mapping[str, Any]
) -> Estimate | None:
    """What is predicted of a config; None where it is impossible there."""
    effective = source.effective_batch_size or 1
    workload = dataclasses.replace(workload, effective_batch_size=effective)
    knobs = {knob: value for knob, value in source.config.items() if value is not None}
    try:
        return predict(workload, knobs, **card).estimate
    except RefusedError:
        return None
