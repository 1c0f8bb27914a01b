"""Tool: what an exporter is. One file in `tools` makes one, and nothing else has to know of it.

A tool maps each knob to its own keys, and states where it deviates from what was measured. `write`
compares a knob's keys with those of its off value, and reports a knob without any effect as a
deviation: no exporter drops one silently.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError, shown
from autofit.core.knobs import KNOBS, is_off, knob_named
from autofit.core.knobs.activation_offload import KNOB as ACTIVATION_OFFLOAD
from autofit.core.knobs.gradient_accumulation_steps import KNOB as ACCUMULATION
from autofit.core.knobs.optimizer_offload import KNOB as OPTIMIZER_OFFLOAD
from autofit.core.layout import Layout
from autofit.core.quoting import python_string, shell_path
from autofit.core.some_blocks import SomeBlocks
from autofit.core.tasks import TASKS, task_named
from autofit.export.header import export_header
from autofit.export.source import (
    NOTHING_MEASURED,
    Deviation,
    ExportSource,
    batches_fit,
    cached_casts,
    nodes_of,
    torchrun,
)
from autofit.export.template import yaml_file

# What tools can train: those for language models, and those around transformers' own classes.
LANGUAGE_MODELS = tuple(task.name for task in TASKS.values() if task.continues_text)


def with_keys_of(tool: str) -> tuple[str, ...]:
    """The tasks that have keys of a tool."""
    return tuple(task.name for task in TASKS.values() if tool in task.tools)


def trained_by(tool: str) -> tuple[str, ...]:
    """What a tool for language models trains: that, and tasks that have keys of its own."""
    return (*LANGUAGE_MODELS, *with_keys_of(tool))


HUGGING_FACE = tuple(
    task.name for task in TASKS.values() if task.script.templates and not task.script.loss
)


@dataclass(frozen=True)
class ToolKeys:
    """A tool's keys for one knob, values by dotted path (`trainer.precision`), and its
    deviations."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    deviations: tuple[Deviation, ...] = ()
    as_measured: bool = False  # the tool always behaves as measured, so on and off may share keys


@dataclass(frozen=True)
class Request:
    """What is written, for which version of which tool."""

    source: ExportSource
    version: str
    title: str
    splits: tuple[str, ...] = ()  # as the tool's

    @property
    def config(self) -> Config:
        return self.source.config

    @property
    def layout(self) -> Layout:
        """How the tool's processes are divided: without those that take part in what it cannot
        split."""
        unsplit = {}
        for name, knob in KNOBS.items():
            if knob.same_samples and name not in self.splits:
                unsplit[name] = 1

        return Layout.of(self.config.replace(**unsplit))

    @property
    def nodes(self) -> int:
        return nodes_of(self.source.hardware, self.layout)

    def text(self, knob: str) -> str:
        """The value of a knob as text; its off value if the config lacks it."""
        return str(self.config.get(knob, self.source.off.get(knob)))

    def since(self, version: str) -> bool:
        """Whether the tool is of that version or later."""
        return _numbers(self.version) >= _numbers(version)

    def measured_before(self, package: str, version: str) -> bool:
        """Whether the config was measured with an older version of a package; False if its version
        is unknown."""
        versions = self.source.versions
        return package in versions and _numbers(versions[package]) < _numbers(version)

    def deviation(self, knob: str, instead: str, *, may_not_fit: bool = False) -> Deviation:
        return Deviation(knob, self.config.get(knob), instead, may_not_fit)

    def keys(
        self,
        knob: str,
        keys: Mapping[str, Any],
        instead: str | None,
        *,
        may_not_fit: bool = False,
    ) -> ToolKeys:
        """The keys of a knob.

        Args:
            instead: how they deviate from what was measured; None: they do not.
            may_not_fit: whether that may take more memory.
        """
        if not instead:
            return ToolKeys(keys)

        deviation = self.deviation(knob, instead, may_not_fit=may_not_fit)
        return ToolKeys(keys, (deviation,))


Share = Callable[[Request], ToolKeys]
Header = tuple[str, ...]  # lines
Files = Callable[[ExportSource, Mapping[str, Any], Header, str], dict[str, str]]


@dataclass(frozen=True)
class Tool:
    """One tool that configs are exported to."""

    # in small letters and without hyphens, the word after `--to` and the name of its file
    title: str
    # where its keys changed, oldest first; the last one is what this was checked with
    versions: tuple[str, ...]
    run: str  # how the export is used, one line, from the slots of `command`
    knobs: Mapping[str, Share]  # the keys of each knob, written out also when it is off
    # keys that no knob decides: the model, the data, how to learn
    fixed: Callable[[Request], Mapping[str, Any]]
    stage: str = ""  # what its command calls the training of a language model
    # the same of any config, where it does not follow from the task
    stage_of: Callable[[ExportSource], str] | None = None
    file: str = ""  # what its most important file is called; empty: NAME.yaml
    # The text of every file by name, that one first, from all keys, nested as the tool has them,
    # the header, and what the first one is called now; None: one YAML file of all keys.
    files: Files | None = None
    run_several: str = ""  # the same on several devices; empty: as on one
    script: str = ""  # the file, beside, that trains what its command has no stage for
    without: str = ""  # what the tool does with a knob that is not in `knobs`, as half a sentence
    without_may_not_fit: bool = True  # that may take more memory than was measured
    tasks: tuple[str, ...] = ()  # what the tool can train; empty: anything
    # of tensor_parallel, context_parallel and pipeline_parallel, those that it has keys for
    splits: tuple[str, ...] = ()
    # the key of experts' parameters that get adapters; empty: there is none
    expert_targets: str = ""
    # the values of `quantization` that it holds experts in, too
    quantises_experts: tuple[Value, ...] = ()
    # whether its autocast keeps copies of weights until a forward is over
    caches_casts: bool = True
    packing: str = ""  # the key for putting samples one after the other
    # whether samples packed so do not see one another; None: a key says it
    apart: bool | None = None
    packs_beside_flash: bool = False  # that key is refused without flash attention
    # what it always does, without such a key; None: what the user's own data loader does
    packs: bool | None = None
    # (device, task) -> whether it computes a loss of its own, which `losses.OF_TOOLS` has
    has_own_loss: Callable[[str, str], bool] = lambda device, task: False
    # why the tool cannot train a config, or None
    refuse: Callable[[ExportSource], str | None] = batches_fit

    @property
    def name(self) -> str:
        """The word after `--to`."""
        return self.title.lower().replace("-", "")

    @property
    def commands(self) -> tuple[str, ...]:
        """What its command calls the trainings that it knows."""
        stages = {self.stage: None}
        for task in TASKS.values():
            stages[task.stages.get(self.name, "")] = None

        return tuple(stage for stage in stages if stage and "." not in stage)

    @property
    def usage(self) -> str:
        """How its files are used on one device, by the names that they have by themselves."""
        return self.run.format(**_names(self.file or f"{self.name}.yaml"), stage=self.stage)

    def why_not(self, source: ExportSource) -> str | None:
        """Why this config cannot be exported to it, or None."""
        title = self.title
        if self.tasks and source.task not in self.tasks:
            return f"{title} trains {', '.join(self.tasks)}, and this is {source.task}."
        if source.rounds:
            return f"{title} is not told how layers round for quantised inference."
        if source.unsaid:
            return f"{title} is not told of {source.unsaid}."

        parts = ", ".join(source.parts)
        if parts and not source.config.lora_rank:
            return f"{title} is not told what to freeze: only {parts} is trained here."

        return self.refuse(source)

    def command(self, request: Request, file: str) -> str:
        """How the export is used, whose first file has that name, with a process for each
        device."""
        layout = request.layout
        nodes = request.nodes
        stage = task_named(request.source.task).stages.get(self.name, self.stage)
        if self.stage_of is not None:
            stage = self.stage_of(request.source)
        if "." in stage:  # a class of the tool's, which a script makes
            started = "python" if layout.world == 1 else torchrun(layout, nodes)
            return f"{started} {self.script} --config {shell_path(file)}"

        if layout.world == 1 or not self.run_several:
            return self.run.format(**_names(file), stage=stage)

        further = ""
        meeting = ""
        if nodes > 1:
            first = "--main_process_ip FIRST_NODE --main_process_port 29500"
            further = f" --machine_rank NODE {first}"
            meeting = f" --nnodes={nodes} --rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500"

        on_cpu = ""
        if request.source.device == "cpu":
            on_cpu = "ACCELERATE_USE_CPU=true "

        return self.run_several.format(
            **_names(file),
            torchrun=torchrun(layout, nodes),
            each=layout.world // nodes,
            nodes=nodes,
            further=further,
            stage=stage,
            rendezvous=meeting,
            on_cpu=on_cpu,
        )

    def schema(self, version: str | None, measured_with: str | None = None) -> str:
        """The version to write for: the newest of `versions` whose keys the given version has.

        Args:
            version: None: the one that the config was measured with, or the newest.
            measured_with: what is taken then; None: not known.

        Raises:
            InputError: that is not a version, or one older than all of `versions`.
        """
        if version is not None and not (isinstance(version, str) and _numbers(version)):
            message = f"{shown(version)} is not a version of {self.title}."
            raise InputError(message, f"For example {self.versions[-1]}.")

        limit = _numbers(version or measured_with or "") or _numbers(self.versions[-1])
        for schema in reversed(self.versions):
            if _numbers(schema) <= limit:
                return schema

        if version is not None:
            message = f"the keys of {self.title} {version} are not known."
            raise InputError(message, f"Give {self.versions[0]} or later.")

        return self.versions[0]


@dataclass(frozen=True)
class Export:
    """What `write` made.

    Attributes:
        files: their texts by name.
        departures: where the tool deviates from what was measured.
        keys: those of each knob.
        predicted: whether nothing was measured.
    """

    tool: str
    version: str
    files: Mapping[str, str]
    departures: tuple[Deviation, ...]
    keys: Mapping[str, Mapping[str, Any]]
    predicted: bool = False

    @property
    def text(self) -> str:
        """All files in one text; each below its name if there are several."""
        if len(self.files) == 1:
            return "".join(self.files.values())
        return "".join(f"# file: {name}\n{text}" for name, text in self.files.items())

    @property
    def message(self) -> str:
        """The deviations, a line each, below a line that says so if nothing was measured."""
        lines = [departure.message for departure in self.departures]
        if self.predicted:
            lines.insert(0, NOTHING_MEASURED)

        return "".join(f"{line}\n" for line in lines)

    def to_json(self) -> dict[str, Any]:
        """The one object that `autofit export --json` prints."""
        return {
            "schema": 1,
            "tool": self.tool,
            "tool_version": self.version,
            "files": dict(self.files),
            "departures": [asdict(departure) for departure in self.departures],
            "predicted": self.predicted,
        }


def write(
    tool: Tool,
    source: ExportSource,
    version: str | None = None,
    file: str = "",
) -> Export:
    """Write a config for a tool.

    Args:
        version: of the tool; None: the one that the config was measured with, or the newest.
        file: what its first file is to be called; empty: as the tool calls it.

    Raises:
        InputError: the tool cannot train this at all, the keys of that version are not known, or
            another file of the tool has that name.
    """
    file = file or tool.file or f"{tool.name}.yaml"
    schema = tool.schema(version, source.versions.get(tool.name))
    request = Request(source, schema, tool.title, tool.splits)
    reason = tool.why_not(source)
    if reason:
        raise InputError(reason, "See `autofit export --to list`.")

    shares = {knob: share_of(tool, knob, request) for knob in source.config}
    others = (
        of_experts(tool, request),
        of_loss_options(tool, source),
        packing_of(tool, source),
    )
    keys = dict(tool.fixed(request))
    deviations: list[Deviation] = []
    for share in (*shares.values(), *others):
        keys |= share.keys
        deviations += share.deviations

    if tool.caches_casts:
        deviations += cached_casts(tool.title, source.config)
    if source.predicted:
        deviations = [
            replace(deviation, instead=deviation.instead.replace("measured", "predicted"))
            for deviation in deviations
        ]

    command = tool.command(request, file)
    title = f"{tool.title} {request.version}"
    header = export_header(title, source, deviations=deviations, run=command)
    tree = nested(keys)
    if tool.files:
        files = tool.files(source, tree, header, file)
        _, *beside = tool.files(source, tree, header, "")
        if file in [PurePosixPath(name).name for name in beside]:
            message = f"{shown(file)} is another file of this export."
            raise InputError(message, "Choose another --output.")
    else:
        files = {file: yaml_file(header, tree)}

    by_knob = {knob: share.keys for knob, share in shares.items()}
    predicted = bool(source.predicted)
    return Export(tool.name, request.version, files, tuple(deviations), by_knob, predicted)


def _names(file: str) -> dict[str, str]:
    """The slots of a command for the name of the first file: as a word of a shell, in Python, and
    as a module."""
    return {
        "file": shell_path(file),
        "literal": python_string(file),
        "module": shell_path(file.removesuffix(".py")),
    }


def packing_of(tool: Tool, source: ExportSource) -> ToolKeys:
    """The key for packed samples; a deviation where the tool has none, and does otherwise."""
    if task_named(source.task).tools:  # which no tool packs
        return ToolKeys()

    is_packed = source.packing
    value = bool(is_packed)
    instead = ""
    if tool.packs_beside_flash and is_packed and source.config.attention != "flash":
        value = False
        instead = "packs beside flash attention only, and pads here"
    elif tool.packing:
        if is_packed and tool.apart not in (None, source.apart):
            instead = "keeps packed samples from seeing one another"
            if source.apart:
                instead = "lets packed samples see those before them"
    elif None not in (tool.packs, is_packed) and tool.packs != is_packed:
        instead = "always pads samples, of whose tokens fewer count"
        if tool.packs:
            instead = "always packs samples"

    keys = {}
    if tool.packing:
        keys[tool.packing] = value
    if not instead:
        return ToolKeys(keys)

    deviation = Deviation("packing", is_packed, f"{tool.title} {instead}")
    return ToolKeys(keys, (deviation,))


def of_loss_options(tool: Tool, source: ExportSource) -> ToolKeys:
    """The keys of the options of the loss; deviations where the tool has none."""
    known = task_named(source.task).loss_keys.get(tool.name, {})
    keys: dict[str, Any] = {}
    deviations = []
    for option, value in source.loss_options.items():
        key = known.get(option)
        if isinstance(key, str):
            keys[key] = value
        elif key is not None and value in key:
            keys |= key[value]
        else:
            instead = f"{tool.title} takes no such option of the loss"
            deviations.append(Deviation(option, value, instead))

    return ToolKeys(keys, tuple(deviations))


def of_experts(tool: Tool, request: Request) -> ToolKeys:
    """Which experts get adapters; deviations where the tool adapts none, or leaves them
    unquantised."""
    source = request.source
    keys: dict[str, Any] = {}
    deviations = []
    if source.adapted_experts and tool.expert_targets:
        keys[tool.expert_targets] = list(source.adapted_experts)
    elif source.adapted_experts:
        instead = f"{tool.title} puts no adapters beside experts"
        deviations.append(request.deviation("lora_targets", instead))

    value = source.config.quantization
    is_held = value in (None, source.off.get("quantization"), *tool.quantises_experts)
    if source.experts and not is_held and "quantization" in tool.knobs:
        instead = f"{tool.title} leaves the experts unquantised"
        deviations.append(request.deviation("quantization", instead, may_not_fit=True))

    return ToolKeys(keys, tuple(deviations))


# No tool has keys for a number of blocks.
_OF_ALL_BLOCKS = (ACTIVATION_OFFLOAD.name, OPTIMIZER_OFFLOAD.name)


def share_of(tool: Tool, knob: str, request: Request) -> ToolKeys:
    """The keys of one knob, with what the tool does otherwise."""
    source = request.source
    of_some = knob in _OF_ALL_BLOCKS and SomeBlocks.of(source.config[knob])
    if of_some:
        source = replace(source, config=source.config.replace(**{knob: of_some.value}))
        share = _share_of(tool, knob, replace(request, source=source))
        if share.deviations:
            return share
        instead = f"{tool.title} does so with all blocks, with less memory and more copies"
        return replace(share, deviations=(request.deviation(knob, instead),))

    share = _share_of(tool, knob, request)
    several = knob == ACCUMULATION.name and request.config[knob] not in (None, 1)
    if not several or tool.name not in task_named(request.source.task).by_micro_batch:
        return share

    instead = f"{tool.title} computes the loss of each micro-batch by itself, autofit of the batch"
    return replace(share, deviations=(*share.deviations, request.deviation(knob, instead)))


def _share_of(tool: Tool, knob: str, request: Request) -> ToolKeys:
    """The same without what tasks change: a deviation if no key depends on the knob's value."""
    source = request.source
    value = source.config[knob]
    off = source.off.get(knob)
    is_registered = knob in source.off
    # tools are asked for these only beside adapters
    of_adapters = bool(knob_named(knob).beside)

    share = tool.knobs.get(knob)
    answer = ToolKeys()
    if share:
        if of_adapters and not source.config.lora_rank:
            return answer
        answer = share(request)

    is_without = is_off(value)
    if is_registered:
        is_without = value in (None, off)
    if is_without or answer.deviations or answer.as_measured:
        return answer

    if share:
        switched_off = replace(source, config=source.config.replace(**{knob: off}))
        if off is None or answer.keys != share(replace(request, source=switched_off)).keys:
            return answer

    instead = f"{tool.title} has nothing for it, and runs without it"
    may_not_fit = not of_adapters
    if tool.without and is_registered and not share:
        instead = tool.without
        may_not_fit = tool.without_may_not_fit
    return request.keys(knob, answer.keys, instead, may_not_fit=may_not_fit)


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted paths as mappings inside mappings, each in the order of its first key."""
    tree: dict[str, Any] = {}
    for path, value in keys.items():
        *parents, last = path.split(".")
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = value

    return tree


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison; empty if it has none."""
    match = re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)", version)
    if match is None:
        return ()

    return tuple(int(part) for part in match[1].split("."))
