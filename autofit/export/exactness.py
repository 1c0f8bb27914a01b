"""Which configs a tool runs exactly as they are measured: rules, which a search takes beside those
of its techniques.

A rule is about one part of a tool's file, so that it reads few knobs, and a search need not try all
combinations of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.core.knobs.lora_targets import KNOB as TARGETS
from autofit.core.workload import Workload
from autofit.export.from_result import layer_names
from autofit.export.source import Deviation, ExportSource, cached_casts
from autofit.export.tool import Request, Tool, of_experts, packing_of, share_of
from autofit.export.tools import tool_named

_CASTS = "copies of autocast"
_EXPERTS = "experts"
_PACKING = "packing"
_REFUSED = "what it refuses"


@dataclass(frozen=True)
class ToolRule:
    """config -> why a tool does not run it as it is measured, as far as one part of its file goes;
    or None.

    Attributes:
        tool: its name.
        part: a knob, or another part.
        source: the model and the task, with every knob off.
        model: makes the model, whose layers' names some parts depend on.
        names: those that are known, by `lora_targets`; all rules of a tool share them.
    """

    tool: str
    part: str
    source: ExportSource
    model: Callable[[], Any]
    names: dict[Value, Mapping[str, Any]] = field(repr=False, compare=False)

    def __call__(self, config: Config) -> str | None:
        tool = tool_named(self.tool)
        source = replace(self.source, config=config)
        if self.part == _REFUSED:
            return tool.refuse(source)
        if self.part in (TARGETS.name, _EXPERTS) and config.lora_rank:
            source = replace(source, **self._names(config.lora_targets))
        try:
            deviations = _deviations(tool, self.part, source)
        except InputError as error:  # what the tool cannot do on this device
            return error.message

        return str(deviations[0]) if deviations else None

    def _names(self, targets: Value) -> Mapping[str, Any]:
        """The names of the layers that adapters are beside, which depend on nothing else."""
        if targets not in self.names:
            config = Config({"lora_rank": 1, TARGETS.name: targets})
            self.names[targets] = layer_names(self.model, config, self.source.task)

        return self.names[targets]


def rules_of(
    tool: Tool,
    workload: Workload,
    source: ExportSource,
) -> Mapping[str, Callable[[Config], str | None]]:
    """The rules of a tool, by the names of the parts of its file.

    Args:
        source: the workload's, with every knob off.

    Raises:
        InputError: the tool does not train this task.
    """
    if tool.tasks and source.task not in tool.tasks:
        message = f"{tool.title} trains {', '.join(tool.tasks)}, and this is {source.task}."
        raise InputError(message, "See `autofit export --to list`.")

    parts = [*source.config, _PACKING, _EXPERTS, _REFUSED]
    if tool.caches_casts:
        parts.append(_CASTS)
    names: dict[Value, Mapping[str, Any]] = {}
    rules = {}
    for part in parts:
        rule = ToolRule(tool.name, part, source, workload.model, names)
        rules[f"{tool.title}: {part}"] = rule

    return rules


def _deviations(tool: Tool, part: str, source: ExportSource) -> tuple[Deviation, ...]:
    """What a tool does otherwise in one part of its file."""
    version = tool.schema(None, source.versions.get(tool.name))
    request = Request(source, version, tool.title, tool.splits)
    if part == _CASTS:
        return cached_casts(tool.title, source.config)
    if part == _PACKING:
        return packing_of(tool, source).deviations
    if part == _EXPERTS:
        return of_experts(tool, request).deviations

    return share_of(tool, part, request).deviations
