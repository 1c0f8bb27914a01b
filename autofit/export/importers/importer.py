"""Importer: how the file of a tool is read, as a config of autofit beside what the file alone
decides.

The values of knobs are found by the tool's exporter: those whose keys it would write most nearly as
the file has them. So there is no second table of what a tool calls things.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError, is_whole, shown
from autofit.core.knobs import knob_named
from autofit.core.knobs.lora_targets import KNOB as TARGETS
from autofit.core.knobs.precision import KNOB as PRECISION
from autofit.core.task import Task
from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.importers.command_line import COMMAND, ENVIRONMENT
from autofit.export.importers.division import Division
from autofit.export.importers.frozen import Trained, Weights
from autofit.export.importers.fsdp import key_of_fsdp
from autofit.export.importers.pictures import PicturesOfFile
from autofit.export.source import ExportSource
from autofit.export.tool import Request, Tool, ToolKeys, write
from autofit.models.fake_quantised import FakeQuantisation

Keys = Mapping[str, Any]

# Knobs that the keys of others depend on, first.
_FIRST = ("lora_rank", "quantization", "precision", "kernels")
_EVALUATED = re.compile(r"(^|[._])eval_")  # what evaluation alone takes stays as it is
_VARIABLES = "env."  # what files set of the environment, which commands have before them
_OFF = (None, False, "", "none", "None", "false")


@dataclass(frozen=True)
class Importer:
    """The files of one tool.

    Attributes:
        tool: its exporter.
        marks: keys that only its files have; one is enough.
        model: the key of the model.
        length: the keys of the tokens of a sample, of which a file has one, and how many they are
            without; those of pictures are no such.
        task: by the keys, what a file trains.
        pictures: by the keys, what a denoiser is trained on; None: no denoiser.
        refuse: by the keys, why a file cannot be tuned, as a sentence; or None.
        divide: by the keys and the folder of the file, how it divides a training over devices.
        targets: the key of the layers that get adapters.
        takes_usual: whether, without that key, those get adapters that peft has for the kind of
            model; else all linear layers.
        section: what the exporter's keys of this file begin with; others are not in it.
        programs: the commands that take these keys as options, such as ("trl", "sft").
        pattern: by the keys, a regular expression of those layers, where a file gives one.
        freezes_vision: whether of a model that takes images, too, adapters are beside what reads
            texts alone.
        trains: by the keys and the model's weights, what is trained without adapters; None: all.
        keeps: by the keys, those that stay: they only cost elsewhere, and decide here what is
            learnt.
        sees: by the keys, whether images stand in its texts.
        rounds: by the keys, how linear layers round in a training for quantised inference.
        fields: by the keys, the task and the model's config.json, how the model or its samples
            differ, as `models.with_fields` takes it.
        stretches: whether it lets models take longer samples than they were made for.
        notes: by the keys, sentences on what is predicted otherwise than the file says.
        beside: by the keys and the folder of the file, keys that stand in another file.
        choices: by the model with all knobs off, values of knobs in place of the usual ones.
        read: the keys, without those that say nothing beside others, and with what the tool works
            out for so many devices.
        written: (the file's keys, those that change, all that the exporter writes now) -> those that
            change, where other keys of the file stand for some.
        older: keys of the exporter, and what they were called before; a file may have those.
        single: further keys that take one value.
        of_script: keys that files have for the script that reads them, not for the tool.
        defaults: what the tool does where a file lacks a key, of keys that its exporter writes.
        meaning: (key, value) -> the value in the exporter's words.
    """

    tool: Tool
    marks: tuple[str, ...]
    model: str
    task: Callable[[Keys], str]
    refuse: Callable[[Keys], str | None]
    length: tuple[tuple[str, ...], int] = ((), 0)
    pictures: Callable[[Keys], PicturesOfFile] | None = None
    targets: str = ""
    divide: Callable[[Keys, Path], Division] = lambda keys, folder: Division()
    takes_usual: bool = False
    section: str = ""
    programs: tuple[tuple[str, str], ...] = ()
    pattern: Callable[[Keys], str | None] = lambda keys: None
    freezes_vision: bool = False
    trains: Callable[[Keys, Weights], Trained | None] = lambda keys, weights: None
    keeps: Callable[[Keys], Sequence[str]] = lambda keys: ()
    sees: Callable[[Keys], bool] = lambda keys: False
    rounds: Callable[[Keys], FakeQuantisation | None] = lambda keys: None
    fields: Callable[[Keys, Task, Keys], Mapping[str, Any]] = lambda keys, task, config: {}
    stretches: bool = False
    notes: Callable[[Keys], Sequence[str]] = lambda keys: ()
    beside: Callable[[Keys, Path], Keys] = lambda keys, folder: {}
    choices: Callable[[ExportSource], Mapping[str, Sequence[Value]]] = lambda source: {}
    read: Callable[[Keys, Division], Keys] = lambda keys, division: keys
    written: Callable[[Keys, Keys, Keys], Keys] = lambda keys, changed, written: changed
    older: Mapping[str, str] = field(default_factory=dict)
    single: tuple[str, ...] = ()
    of_script: frozenset[str] = frozenset()
    defaults: Keys = field(default_factory=dict)
    meaning: Callable[[str, Any], Any] = lambda key, value: value

    def check(self, keys: Keys) -> None:
        """Raise an InputError where a key that takes one value has several, or none of its kind."""
        for key in (*self.defaults, *self.single):
            if isinstance(self.defaults.get(key), dict | list):
                continue

            name = self.name_of(keys, key)
            found = _value_of(keys, name)
            if isinstance(found, list | dict):
                raise InputError(f"{name} must be one value, not {shown(found)}.", "Correct it.")

    def is_of(self, keys: Keys) -> bool:
        """Whether a file with these keys is one of this tool."""
        return any(mark in keys for mark in self.marks)

    def says(self, keys: Keys, key: str) -> Any:
        """What a file says by a key, or the tool does without it, in the exporter's words."""
        name = self.name_of(keys, key)
        value = _value_of(keys, name)
        if value is None:
            value = self.defaults.get(key)
        elif name.startswith(ENVIRONMENT):
            value = str(value)

        return self.meaning(key, value)

    def has(self, keys: Keys, key: str) -> bool:
        """Whether a file itself has a key of the exporter."""
        return _value_of(keys, self.name_of(keys, key)) is not None

    def name_of(self, keys: Keys, key: str) -> str:
        """What a file calls a key of the exporter."""
        key = key.removeprefix(self.section)
        if COMMAND in keys and key.startswith(_VARIABLES):
            return ENVIRONMENT + key.removeprefix(_VARIABLES)

        of_fsdp = key_of_fsdp(keys, key)
        if of_fsdp:
            return of_fsdp

        for older in self.older.values():
            if older in keys or _below(keys, older):
                return self.older.get(key, key)
        return key

    def adapted(self, keys: Keys) -> Value:
        """The layers that get adapters, as `lora_targets` has them, where no pattern says it."""
        found = keys.get(self.targets)
        if self.pattern(keys) is not None or found in ("all", "all-linear"):
            return "all-linear"

        if isinstance(found, str):
            found = [name.strip() for name in found.split(",")]
        if not isinstance(found, list) or not found:
            return "all-linear"
        return "+".join(map(str, found))

    def adapted_experts(self, keys: Keys) -> tuple[str, ...]:
        """The weights of experts, which are no layers, that a file names for adapters."""
        found = keys.get(self.tool.expert_targets)
        names = [found] if isinstance(found, str) else found
        if not isinstance(names, list):
            return ()
        return tuple(str(name) for name in names)

    def loss_options(self, keys: Keys, task: Task) -> dict[str, Any]:
        """The options of the loss that a file says, as `Task.loss_keys` has them."""
        found: dict[str, Any] = {}
        for option, said in task.loss_keys.get(self.tool.name, {}).items():
            if isinstance(said, str):
                value = keys.get(said)
                if _is_number(value):
                    found[option] = value
                continue

            for value, wanted in said.items():
                if wanted.items() <= keys.items():
                    found[option] = value

        return found

    def sample_tokens(self, keys: Keys) -> int:
        """The tokens of a sample.

        Raises:
            InputError: the file says no whole number.
        """
        names, default = self.length
        key = next((name for name in names if name in keys), names[0])
        found = keys.get(key, default)
        if found == 0 and key not in keys:
            raise InputError("the file says no length of samples.", "Give it: --seq-len TOKENS.")
        if not is_whole(found, 1):
            raise InputError(f"{key} must be a whole number, not {shown(found)}.", "Correct it.")
        return int(found)


def config_of(
    importer: Importer,
    keys: Keys,
    source: ExportSource,
    choices: Mapping[str, Sequence[Value]],
    division: Division,
) -> Config:
    """The config that a file stands for.

    Args:
        source: the model and the task of the file, with all knobs off.
        choices: the values of each knob that is no number.
        division: how the file divides the training; all else is read as on one device.

    Raises:
        InputError: the file asks for what no value of a knob is, or gives no number for one.
    """
    tool = importer.tool
    source = replace(source, effective_batch_size=None)  # which the file's sizes make
    keys = importer.read(keys, division)
    choices = {**choices, **importer.choices(source)}
    others = (knob for knob in tool.knobs if knob not in _FIRST)
    for knob in (*_FIRST, *others):
        if knob not in tool.knobs or knob not in source.config or knob_named(knob).of_devices:
            continue
        if knob_named(knob).beside and not source.config.lora_rank:
            value = source.off.get(knob)  # of adapters
        elif knob == TARGETS.name:
            value = importer.adapted(keys)
        elif choices.get(knob):
            value = _nearest(importer, keys, source, knob, choices[knob])
        else:
            value = _number(importer, keys, source, knob)

        source = with_knob(source, knob, value)

    if division.widens:
        source = _widened(importer, source, choices)

    return source.config.replace(**division.knobs)


def _widened(
    importer: Importer,
    source: ExportSource,
    choices: Mapping[str, Sequence[Value]],
) -> ExportSource:
    """The same with weights in float32 where the file asks for autocast: FSDP and DeepSpeed widen
    those that are trained, which a tool may leave in 16 bits on one device."""
    knob = PRECISION.name
    narrow = source.config[knob]
    wide = f"{narrow}-mixed"
    if wide not in choices.get(knob, ()):
        return source

    keys_of_narrow = _share(importer, source, knob, narrow).keys
    keys_of_wide = _share(importer, source, knob, wide).keys
    if keys_of_narrow != keys_of_wide:
        return source
    return with_knob(source, knob, wide)


def changes(
    importer: Importer,
    keys: Keys,
    before: ExportSource,
    after: ExportSource,
    knobs: Collection[str],
) -> Keys:
    """The keys of a file that say something else for another config, with their new values.

    Args:
        knobs: those that were open.
    """
    old = write(importer.tool, before).keys
    new = write(importer.tool, after).keys
    found: dict[str, Any] = {}
    for knob in new:
        if knob not in knobs:
            continue

        was = old.get(knob, {})
        for key, value in new[knob].items():
            is_same = was.get(key) == value or _same(importer.says(keys, key), value)
            if not is_same and not _EVALUATED.search(key):
                found[importer.name_of(keys, key)] = value

    every = {key: value for share in new.values() for key, value in share.items()}

    return importer.written(keys, found, every)


def can_become(
    importer: Importer,
    source: ExportSource,
    knob: str,
    value: Value,
) -> bool:
    """Whether the file has all keys for another value of a knob, and the tool does what it says."""
    try:
        changed = write(importer.tool, with_knob(source, knob, value))
    except InputError:  # what the tool cannot do on this device
        return False

    if any(departure.knob == knob for departure in changed.departures):
        return False

    before = write(importer.tool, source).keys.get(knob, {})
    after = changed.keys.get(knob, {})
    differing = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    return all(key.startswith(importer.section) for key in differing)


def with_knob(source: ExportSource, knob: str, value: Value) -> ExportSource:
    """The same with another value of a knob."""
    return replace(source, config=source.config.replace(**{knob: value}))


def _share(
    importer: Importer,
    source: ExportSource,
    knob: str,
    value: Value,
) -> ToolKeys:
    """What the exporter writes for a value of a knob."""
    tool = importer.tool
    changed = with_knob(source, knob, value)
    request = Request(changed, tool.versions[-1], tool.title, tool.splits)
    return tool.knobs[knob](request)


def _nearest(
    importer: Importer,
    keys: Keys,
    source: ExportSource,
    knob: str,
    values: Sequence[Value],
) -> Value:
    """The value whose keys differ from the file's in the fewest, of those that tell values apart;
    of several, the one whose keys the file has most of, whose numbers are nearest, and that the
    tool trains exactly.

    Raises:
        InputError: the file says something by such a key that no value is.
    """
    shares = {}
    for value in values:
        with contextlib.suppress(InputError):  # what the tool cannot do on this device
            shares[value] = _share(importer, source, knob, value)

    every = [share.keys for share in shares.values()]
    telling = set()
    for written in every:
        for key, said in written.items():
            if any(other.get(key) != said for other in every):
                telling.add(key)

    ranks = {}
    for value, share in shares.items():
        differing = 0.0
        in_file = 0
        apart = 0.0  # of numbers
        for key in telling:
            said = importer.says(keys, key)
            if key not in share.keys:
                if said is True:  # the file switches on what this value does not write
                    differing += 0.5
            elif not _same(said, share.keys[key]):
                differing += 1
                if _is_number(said) and _is_number(share.keys[key]):
                    apart += abs(said - share.keys[key])
            elif importer.has(keys, key):
                in_file += 1
        ranks[value] = (differing, -in_file, apart, bool(share.deviations))

    for key in telling:
        said = importer.says(keys, key)
        is_known = any(_same(said, written.get(key)) for written in every)
        asked = keys.get(importer.name_of(keys, key))
        if isinstance(asked, str) and not is_known:
            remedy = "Tune a file without it, or with another value."
            raise InputError(f"{key}: {shown(asked)} is nothing that autofit knows.", remedy)

    return min(ranks, key=lambda value: ranks[value])


def _number(
    importer: Importer,
    keys: Keys,
    source: ExportSource,
    knob: str,
) -> Value:
    """The number of a knob, by the key that follows it; off where the file has none."""
    off = source.off.get(knob)
    if off is not None and _is_off(importer, keys, source, knob, off):
        return off

    of_two = _share(importer, source, knob, 2).keys
    of_three = _share(importer, source, knob, 3).keys
    for key, value in of_two.items():
        if value != 2 or of_three.get(key) != 3:
            continue

        found = importer.says(keys, key)
        if found in _OFF:
            return off
        if not _is_number(found):
            raise InputError(f"{key} must be a number, not {shown(found)}.", "Correct it.")
        return found  # type: ignore[no-any-return]

    return off


def _is_number(value: Any) -> bool:
    """Whether a value is a whole number or a fraction; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_off(
    importer: Importer,
    keys: Keys,
    source: ExportSource,
    knob: str,
    off: Value,
) -> bool:
    """Whether a file says what is written where a knob is off, and not what is where it is on."""
    without = _share(importer, source, knob, off).keys
    beside = _share(importer, source, knob, 2).keys
    for key in without.keys() & beside.keys():
        value = without[key]
        if beside[key] != value and _same(importer.says(keys, key), value):
            return True

    return False


def _value_of(keys: Keys, key: str) -> Any:
    """What a file says by a key, or by keys below it."""
    value = keys.get(key)
    if value is None:
        return _below(keys, key)
    return value


def _below(keys: Keys, key: str) -> dict[str, Any] | None:
    """A mapping that a file holds as keys below one; None where there are none."""
    prefix = f"{key}."
    found = {}
    for path, value in keys.items():
        if path.startswith(prefix):
            found[path.removeprefix(prefix)] = value

    return found or None


def _same(said: Any, value: Any) -> bool:
    """Whether what a file says and what an exporter writes mean the same."""
    if said in _OFF and value in _OFF:
        return True
    if isinstance(said, dict | list) or isinstance(value, dict | list):
        return bool((said or None) == (value or None))
    return bool(said == value)


def refused_key(keys: Keys, refused: Mapping[str, str]) -> str | None:
    """Why a file cannot be tuned, as a sentence; None where nothing is in the way.

    Args:
        refused: keys, of which a file may have none, nor any below them, and why.
    """
    for name, why in refused.items():
        if keys.get(name) or _below(keys, name):
            return f"{name}: {why}."

    return None


def task_of_keys(tool: str, wanted: Keys) -> str:
    """The name of the task that is told to a tool by these keys; else that of language models."""
    for task in TASKS.values():
        if task.tools.get(tool, {}).items() >= wanted.items():
            return task.name

    return CAUSAL_LM.name
