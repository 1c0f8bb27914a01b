"""Tool: what an exporter is. One file in `tools` makes one, and nothing else has to know of it.

A tool says knob by knob which of its keys hold a value, and where it departs from what was measured. What it says
nothing of is a departure by itself: `write` compares a knob's keys with those of its off value, so that no exporter can
leave one out in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.core.knobs import is_off
from autofit.export.deviation import Deviation
from autofit.export.heading import heading
from autofit.export.source import NOTHING_MEASURED, ExportSource, as_predicted

HUGGING_FACE = ("causal-lm", "masked-lm", "sequence-classification", "image-classification")


@dataclass(frozen=True)
class Request:
    """What is to be written, for which version of the tool."""

    found: ExportSource
    version: str

    @property
    def config(self) -> Config:
        return self.found.config

    def since(self, version: str) -> bool:
        """Whether the tool is of that version or later."""
        return _numbers(self.version) >= _numbers(version)

    def measured_before(self, package: str, version: str) -> bool:
        """Whether the config was measured with an older version of a package; False where its version is unknown."""
        return package in self.found.versions and _numbers(self.found.versions[package]) < _numbers(version)

    def text(self, knob: str) -> str:
        """The value of a knob as text; its off value where the config does not hold it."""
        return str(self.config.get(knob, self.found.off.get(knob)))

    def departs(self, knob: str, instead: str, *, may_not_fit: bool = False) -> Deviation:
        return Deviation(knob, self.config.get(knob), instead, may_not_fit)

    @property
    def convolutions(self) -> tuple[Deviation, ...]:
        """Of a tool that leaves the rounding of fp32 to PyTorch: where there may be convolutions, those are in TF32."""
        on_a_card = self.found.device == "cuda" and self.text("precision") == "fp32"
        if not on_a_card or self.found.task not in ("image-classification", "custom"):
            return ()
        off = "torch.backends.cudnn.allow_tf32 = False"
        return (self.departs("precision", f"PyTorch rounds convolutions to TF32 unless the script sets {off}"),)


@dataclass(frozen=True)
class ToolKeys:
    """What a tool is told of one knob: values by the paths of its keys (`trainer.precision`), and departures.

    `anyway` is whether the tool does what was measured whatever it is told, so that its keys need not differ.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    departures: tuple[Deviation, ...] = ()
    anyway: bool = False


@dataclass(frozen=True)
class Document:
    """What the files of an export are made from: all keys, nested as the tool has them, and the lines of the head."""

    request: Request
    keys: Mapping[str, Any]
    head: tuple[str, ...]


@dataclass(frozen=True)
class Tool:
    """One tool that configs are exported to.

    Args:
        name: the word after `--to`, and the name of its file.
        versions: those at which its keys changed, oldest first; the last one is what this was checked with.
        run: how the export is used, one line.
        knobs: knob -> its share, keys written out also when it is off; a knob that is not here has no keys.
        fixed: keys that no knob decides: the model, data, how to learn.
        files: the text of every file by its name, the one that matters most first.
        tasks: what the tool can train; empty: anything.
    """

    name: str
    title: str
    versions: tuple[str, ...]
    run: str
    knobs: Mapping[str, Callable[[Request], ToolKeys]]
    fixed: Callable[[Request], Mapping[str, Any]]
    files: Callable[[Document], dict[str, str]]
    tasks: tuple[str, ...] = ()
    refuse: Callable[[ExportSource], str | None] = lambda found: None

    def why_not(self, found: ExportSource) -> str | None:
        """Why this config cannot be exported to it, or None."""
        if self.tasks and found.task not in self.tasks:
            return f"{self.title} trains {', '.join(self.tasks)}, and this is {found.task}."
        return self.refuse(found)

    def schema(self, version: str | None, measured_with: str | None = None) -> str:
        """The version to write for: the newest known one whose keys that version has.

        Without `version`, that is the one that the config was measured with, or the newest.

        Raises:
            InputError: not a version, or one older than what is known.
        """
        if version is None:
            limit = _numbers(measured_with or self.versions[-1])
            return next((each for each in reversed(self.versions) if _numbers(each) <= limit), self.versions[0])
        if not _numbers(version):
            raise InputError(f"{version!r} is not a version of {self.title}.", f"For example {self.versions[-1]}.")
        known = [each for each in self.versions if _numbers(each) <= _numbers(version)]
        if not known:
            message = f"the keys of {self.title} {version} are not known."
            raise InputError(message, f"Give {self.versions[0]} or later.")
        return known[-1]


@dataclass(frozen=True)
class Export:
    """What `write` made: files by name, where the tool departs from what was measured, and the keys of each knob."""

    tool: str
    version: str
    files: Mapping[str, str]
    departures: tuple[Deviation, ...]
    keys: Mapping[str, Mapping[str, Any]]
    predicted: bool = False

    @property
    def text(self) -> str:
        """All files in one text; each below its name where there are several."""
        if len(self.files) == 1:
            return "".join(self.files.values())
        return "".join(f"# file: {name}\n{text}" for name, text in self.files.items())

    @property
    def told(self) -> str:
        """That nothing was measured, where it is so, and the departures, a line each."""
        unmeasured = [NOTHING_MEASURED] if self.predicted else []
        return "".join(f"{line}\n" for line in (*unmeasured, *(each.told for each in self.departures)))

    def to_json(self) -> dict[str, Any]:
        """The one object that `autofit export --json` prints."""
        return {
            "schema": 1,
            "tool": self.tool,
            "tool_version": self.version,
            "files": dict(self.files),
            "departures": [each.to_dict() for each in self.departures],
            "predicted": self.predicted,
        }


def write(tool: Tool, found: ExportSource, version: str | None = None) -> Export:
    """Write a config for a tool.

    Raises:
        InputError: the tool cannot train this at all, or nothing is known of that version.
    """
    request = Request(found, tool.schema(version, found.versions.get(tool.name)))
    reason = tool.why_not(found)
    if reason:
        raise InputError(reason, "See `autofit export --to list`.")
    told = {knob: _told(tool, knob, request) for knob in found.config}
    departures = tuple(each for share in told.values() for each in share.departures)
    if found.predicted:
        departures = tuple(replace(each, instead=as_predicted(each.instead)) for each in departures)
    keys = dict(tool.fixed(request))
    for share in told.values():
        keys |= share.keys
    head = heading(f"{tool.title} {request.version}", found, departures=departures, run=tool.run)
    files = tool.files(Document(request, nested(keys), head))
    return Export(
        tool.name,
        request.version,
        files,
        departures,
        {knob: share.keys for knob, share in told.items()},
        bool(found.predicted),
    )


def _told(tool: Tool, knob: str, request: Request) -> ToolKeys:
    """One knob's share; where nothing of it reaches the tool, that is said."""
    value, share = request.config[knob], tool.knobs.get(knob)
    off = request.found.off.get(knob)
    known = knob in request.found.off
    told = share(request) if share else ToolKeys()
    if told.departures or told.anyway or (value in (None, off) if known else is_off(value)) or (share and off is None):
        return told
    plain = share(_with_off(request, knob, off)).keys if share else {}
    if told.keys != plain:
        return told
    instead = f"{tool.title} has nothing for it, and runs without it"
    return ToolKeys(told.keys, (Deviation(knob, value, instead, may_not_fit=True),))


def _with_off(request: Request, knob: str, off: Value) -> Request:
    return replace(request, found=replace(request.found, config=request.config.replace(**{knob: off})))


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted paths as mappings inside mappings, in the order in which each first comes."""
    tree: dict[str, Any] = {}
    for path, value in keys.items():
        *parents, last = path.split(".")
        place = tree
        for name in parents:
            inner = place.get(name)
            if not isinstance(inner, dict):
                inner = place[name] = {}
            place = inner
        place[last] = value
    return tree


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to be compared; empty for what is none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()
