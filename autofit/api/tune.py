"""`autofit.tune`: the file of another tool, with what only costs chosen for a card, and nothing
else in it changed."""

import contextlib
import dataclasses
import difflib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from autofit.api.estimate import predict
from autofit.api.in_tool import InTool, Said, python_of_tool, train_in_tool
from autofit.api.search import search
from autofit.api.tool_file import Reading, as_read, choices_of_knobs, read
from autofit.api.tool_workload import SIZES
from autofit.api.worth import Gain, Worth, worth_changing
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, NothingFitsError, RefusedError, require
from autofit.core.estimate import Estimate
from autofit.core.events import Listener, Note
from autofit.core.files import write_atomically
from autofit.core.knobs import knob_named
from autofit.core.knobs.activation_offload import KNOB as OFFLOAD
from autofit.core.knobs.micro_batch_size import KNOB as MICRO_BATCH
from autofit.core.options import search_options
from autofit.core.result import Result
from autofit.core.some_blocks import SomeBlocks
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.export.exactness import ToolRule
from autofit.export.importers import document_of
from autofit.export.importers.division import Division
from autofit.export.importers.document import flat
from autofit.export.importers.importer import (
    Importer,
    can_become,
    changes,
    config_of,
)
from autofit.export.source import ExportSource
from autofit.export.tool import write
from autofit.setup.technique import Technique
from autofit.techniques import all_techniques
from autofit.tuning.fractions import LEVERS
from autofit.tuning.predicted import CUT_SHORT


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
        in_tool: what the file's own tool took to train from it, where that was asked.
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
    in_tool: InTool | None = None

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
            "in_tool": self.in_tool and self.in_tool.to_dict(),
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
    verify_in_tool: bool = False,
    tool_python: str | Path | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> Tuned:
    """Choose what only costs in a file of another tool, such as axolotl, TRL or sd-scripts: micro-batch,
    accumulation, checkpointing, offloading, attention, kernels, compiling. What is learnt stays as
    it is.

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
        verify_in_tool: train some steps from the new file by its own tool, on random weights and
            rows of the worst length: `Tuned.in_tool`.
        tool_python: the interpreter that has the tool; default: this one.
        options: as of `search`: gpu_mem, gpu, device, mem, trials, time_limit, ...; the time bounds
            the search, and finding out what each change brings.

    Raises:
        InputError: the file cannot be tuned, or an argument is wrong; NothingFitsError: no config
            fits that learns the same.
    """
    _check_keys("keep", keep)
    _check_keys("free", free)
    is_flag = isinstance(verify_in_tool, bool)
    require(is_flag, "verify_in_tool must be True or False", verify_in_tool)
    if tool_python is not None and not verify_in_tool:
        message = "tool_python is for a verification in the tool, and none is asked."
        raise InputError(message, "Add --verify-in-tool, or leave it out.")

    is_over = _timer(options.get("time_limit"))
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
    importer = found.importer
    keys = found.document.keys
    workload = found.workload
    before = found.before
    python = python_of_tool(found, tool_python, device) if verify_in_tool else None

    kept = (*keep, *importer.keeps(keys))
    settings = settings_of(found, kept, free)
    options = {**options, "devices": found.there.devices, "nodes": found.there.nodes}
    result = search(
        searched_workload(found),
        listener=listener,
        space="everything",
        set=settings,
        **options,
    )
    if result.config is None:
        message = f"no config that learns what {found.name} says is predicted to fit."
        cut_short = [note for note in result.notes if note.endswith(CUT_SHORT)]
        message = " ".join([message, *cut_short])
        larger = "a larger card"
        for each in result.remedies:
            if each.kind == "memory":
                larger = f"{' '.join(each.options)}, which is predicted to be enough"
        remedy = f"Free a key with --free, such as optimizer, or take {larger}."
        raise NothingFitsError(message, remedy)

    after, is_open = as_tool_reads(found, result.config, settings)
    card = _Card.of(options, result)
    worth = Worth(after)
    if result.best is None:  # what was measured stays as it was
        seconds = functools.partial(card.seconds, workload)
        worth = worth_changing(importer, keys, before, after, seconds, is_over)
        after = worth.chosen

    changed = changes(importer, keys, before, after, is_open)
    notes = list(found.notes)
    unjudged = [key for key in worth.unjudged if key in changed]
    if unjudged:
        names = ", ".join(unjudged)
        notes.append(f"The time limit was over before it was known what each brings: {names}.")
    predicted = card.predicted(workload, after)
    tuned = Tuned(
        path=found.path,
        tool=importer.tool.title,
        original=found.document.text,
        text=found.document.changed(changed),
        changes=changed,
        before=card.predicted(workload, before),
        after=predicted,
        gains=tuple(gain.among(changed) for gain in worth.gains),
        result=result,
        notes=tuple(notes),
    )
    if python is None:
        return tuned

    if listener is not None:
        listener(Note(f"{tuned.tool} trains some steps from the tuned file."))
    written = document_of(tuned.text, found.name, is_command=found.path is None)
    said = Said.of(result, predicted)
    in_tool = train_in_tool(python, found, keys=written.keys, after=after, said=said)
    return dataclasses.replace(tuned, in_tool=in_tool)


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


@dataclass(frozen=True)
class _Card:
    """What a file is tuned for.

    Attributes:
        options: those of `estimate` that name it.
        usable: bytes that a config may take at most.
    """

    options: Mapping[str, Any]
    usable: int
    _known: dict[Config, Estimate | None] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], result: Result) -> Self:
        """That of a search."""
        names = ("gpu", "gpu_mem", "device", "mem", "devices", "nodes", "link")
        given = {name: options[name] for name in names if options.get(name)}
        return cls(given, result.budget.cap_bytes(result.hardware.device))

    def predicted(self, workload: Workload, source: ExportSource) -> Estimate | None:
        """What is predicted of a config; None where it is impossible there."""
        if source.config not in self._known:
            effective = source.effective_batch_size or 1
            workload = dataclasses.replace(workload, effective_batch_size=effective)
            knobs = {knob: value for knob, value in source.config.items() if value is not None}
            estimate: Estimate | None = None
            with contextlib.suppress(RefusedError):
                estimate = predict(workload, knobs, **self.options).estimate
            self._known[source.config] = estimate
        return self._known[source.config]

    def seconds(self, workload: Workload, source: ExportSource) -> float | None:
        """The seconds of a step that surely fits; None of any other."""
        estimate = self.predicted(workload, source)
        if estimate is None or estimate.high > self.usable:
            return None
        return estimate.step_seconds


def _timer(time_limit: Any) -> Callable[[], bool]:
    """A function that tells whether the time is over, counted from now; without a limit it never
    is."""
    limit = search_options(time_limit=time_limit).time_limit
    end = time.monotonic() + (limit or math.inf)
    return lambda: time.monotonic() >= end


def _check_keys(name: str, given: Any) -> None:
    is_list = isinstance(given, list | tuple) and all(isinstance(key, str) for key in given)
    require(is_list, f"{name} must be a list of keys", given)


def searched_workload(found: Reading) -> Workload:
    """What a file trains, with what no combination of values may break."""
    return dataclasses.replace(
        found.workload,
        effective_batch_size=found.before.effective_batch_size or 1,
        rules={**found.workload.rules, **_rules(found)},
    )


def as_tool_reads(
    found: Reading,
    config: Config,
    settings: Mapping[str, Sequence[Value]],
) -> tuple[ExportSource, set[str]]:
    """What the tool makes of a file that is changed to a config, and the knobs that were open.

    One key may switch on more than the search asked for.
    """
    before = found.before
    after = as_read(before, Config({**before.config, **config}), found.workload)
    is_open = {knob for knob in after.config if len(settings.get(knob, ())) != 1}

    importer = found.importer
    changed = changes(importer, found.document.keys, before, after, is_open)
    written = {**found.document.keys, **flat(changed)}
    reread = config_of(importer, written, _off(after), choices_of_knobs(), found.division)

    values = {}
    for knob in is_open:
        if knob not in SIZES and not knob_named(knob).of_devices:
            values[knob] = reread[knob]

    return as_read(after, after.config.replace(**values), found.workload), is_open


def settings_of(
    found: Reading,
    keep: Sequence[str],
    free: Sequence[str],
) -> dict[str, tuple[Value, ...]]:
    """The values that each knob may take: where only the cost changes, all that the tool trains
    exactly; else the one of the file."""
    source = found.before
    division = found.division
    kept, freed = _kept_and_freed(found, keep, free)
    # The degrees follow from whether weights are divided, and are open where that is.
    layout = division.open_layout
    degrees_follow = found.there.world > 1 and layout is not None and layout not in kept

    settings: dict[str, tuple[Value, ...]] = {}
    choices = choices_of_knobs()
    for technique in all_techniques():
        name = technique.name
        value = source.config[name]
        knob = knob_named(name)
        if name in SIZES:
            # Of both, whose product stays, one is searched.
            if name == MICRO_BATCH.name and not kept.isdisjoint(SIZES):
                settings[name] = (value,)
            continue

        is_unset = value is None and technique.off is None and name not in freed
        if is_unset or knob.derived:
            continue  # it follows from others
        if knob.of_devices and degrees_follow and name != layout:
            continue

        settings[name] = (value,)
        is_open = name in found.importer.tool.knobs and name not in kept
        if knob.of_devices and name not in division.open:
            is_open = False
        if is_open:
            others = choices.get(name, ())
            settings[name] += _others(found, technique, others, is_freed=name in freed)
    return settings


def _kept_and_freed(
    found: Reading, keep: Sequence[str], free: Sequence[str]
) -> tuple[set[str], set[str]]:
    """The knobs that stay, and those that may change though something else is learnt then.

    Raises:
        InputError: a key is none of a knob.
    """
    importer = found.importer
    knob_of: dict[str, str] = {}
    for knob in importer.tool.knobs:
        if knob not in found.before.config or not _has_key(knob, found.division):
            continue
        for key in _keys_of(importer, found.before, knob):
            knob_of.setdefault(importer.name_of(found.document.keys, key), knob)

    for key in (*keep, *free):
        if key not in knob_of:
            known = ", ".join(knob_of)
            raise InputError(f"{key} is no key that autofit tunes.", f"It knows {known}.")
    kept = {knob_of[key] for key in keep} | set(found.division.holds)
    if importer.tool.name in TASKS[found.workload.task].by_micro_batch:
        kept.add(MICRO_BATCH.name)

    return kept, {knob_of[key] for key in free}


def _others(
    found: Reading, technique: Technique, values: Sequence[Value], *, is_freed: bool
) -> tuple[Value, ...]:
    """The other values of a knob that the tool trains exactly, and that learn the same where the
    knob was not freed."""
    name = technique.name
    value = found.before.config[name]
    workload = found.workload
    possible = found.division.only.get(name, values)

    allowed = []
    for other in values:
        if other == value or other not in possible:
            continue
        if other is None and knob_named(name).of_devices:
            continue
        same = technique.exact(value, workload) and technique.exact(other, workload)
        if not (same or is_freed):
            continue
        if can_become(found.importer, found.before, name, other):
            allowed.append(other)
    return tuple(allowed)


@dataclasses.dataclass(frozen=True)
class _OfSomeBlocks:
    """A tool's rule about the values of a knob that are for some blocks alone."""

    rule: ToolRule

    def __call__(self, config: Config) -> str | None:
        some = SomeBlocks.of(config[self.rule.part])
        return self.rule(config) if some else None


def _rules(found: Reading) -> dict[str, Callable[[Config], str | None]]:
    """What no combination of values may break.

    Of tools that offload checkpointed blocks alone, one value would switch the other off; and few
    have keys for a number of blocks.
    """
    tool = found.importer.tool

    def rule_of(part: str) -> ToolRule:
        return ToolRule(tool.name, part, _off(found.before), found.workload.model, {})

    rules: dict[str, Callable[[Config], str | None]] = {}
    for knob in LEVERS:
        if knob in tool.knobs:
            rules[f"{tool.title}: {knob}"] = _OfSomeBlocks(rule_of(knob))

    offload = OFFLOAD.name
    if offload in tool.knobs and not rule_of(offload)(found.before.config):
        rules[f"{tool.title}: {offload}"] = rule_of(offload)

    return rules


def _off(source: ExportSource) -> ExportSource:
    """The same with every knob off."""
    return dataclasses.replace(source, config=Config({**source.off, **dict.fromkeys(SIZES, 1)}))


def _has_key(knob: str, division: Division) -> bool:
    """Whether the file can say another value of a knob; of several devices it often cannot."""
    if not knob_named(knob).of_devices:
        return True
    return knob in division.open or division.open_layout is not None


def _keys_of(importer: Importer, source: ExportSource, knob: str) -> list[str]:
    """The keys of a file that a knob decides."""
    return list(write(importer.tool, source).keys.get(knob, {}))
