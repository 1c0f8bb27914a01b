"""Hands a found config over to other tools: what `export` writes, given what only the model can tell.

The names of layers that adapters are put beside are taken from the model's structure, made again without weights; whose
weights they are, from the preset or the directory that was searched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.files import write_atomically
from autofit.core.hardware import GIB, Hardware
from autofit.core.result import Result, SavedResult
from autofit.core.workload import CLASSIFICATION_TASKS
from autofit.export.source import WEIGHTS, ExportSource
from autofit.export.tool import HUGGING_FACE, Export, write
from autofit.export.tools import all_tools, tool_named
from autofit.models import load_preset, preset_names, workload_from_source
from autofit.report import nothing_fits
from autofit.setup.layers import output_heads
from autofit.techniques import all_techniques, check
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.meta_model import meta_model_from

Factory = Callable[[], Any]
# What a knob may be at all is the same everywhere; a result is exported on any machine.
_ANY = Hardware(device="cuda", name="any", memory_bytes=0, host_memory_bytes=0, host_free_bytes=0, cores=1)


def export(
    result: Result | SavedResult | str | Path,
    *,
    to: str,
    output: str | Path | None = None,
    strict: bool = False,
    tool_version: str | None = None,
) -> Export:
    """Write a found config for another tool.

    Args:
        result: a search's result, or the path of a result.yaml.
        to: a tool, such as "axolotl".
        output: the file to write; what else the tool needs is written beside it. Without it nothing is written.
        strict: refuse what the tool cannot be told as it was measured.
        tool_version: of the tool; default: the one that the config was measured with, else the newest known.

    Raises:
        InputError: no such tool, one that cannot train this, a value that a knob never takes, or, when strict, a tool
            that departs from what was measured.
        NothingFitsError: a result without a config.
    """
    tool = tool_named(to)
    if isinstance(result, str | Path):
        result = SavedResult.load(Path(result))
    made = write(tool, _found(result, _factory(result)), tool_version)
    if strict and made.departures:
        said = " ".join(map(str, made.departures))
        raise InputError(f"{tool.title} cannot be told all of this config: {said}", "Leave out --strict to accept it.")
    if output is not None:
        _write(made, Path(output).expanduser())
    return made


def export_all(result: Result, model: Factory, directory: Path, *, notify: Callable[[str], None]) -> None:
    """Write a found config for every tool that can train it; `tell` hears of those that refuse it."""
    found = _found(result, model)
    for tool in all_tools():
        if tool.why_not(found):
            continue
        try:
            files = write(tool, found).files
        except InputError as error:
            notify(f"not exported to {tool.title}: {error.message}")
            continue
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)


def _write(made: Export, output: Path) -> None:
    """The first file by the name that is asked for; the others beside it, which may name the first one."""
    first = Path(next(iter(made.files))).name
    for number, (name, text) in enumerate(made.files.items()):
        path = output.with_name(Path(name).name) if number else output
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.replace(first, output.name))
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}.", "Choose another --output.") from error


def _found(result: Result | SavedResult, model: Factory | None) -> ExportSource:
    off = {each.name: each.off for each in all_techniques()}
    if isinstance(result, Result):
        if result.config is None:
            raise nothing_fits(result)
        config, measured = result.config, result.best.to_measured() if result.best else {}
        predicted = result.predicted_best.to_predicted() if result.predicted_best else {}
        hardware = {**result.hardware.to_dict(), "budget_gib": round(result.budget.device_bytes / GIB, 3)}
    else:
        config, measured, hardware = result.config, dict(result.measured), dict(result.hardware)
        predicted = dict(result.predicted)
    config = Config({**off, **config})
    # Knobs of one's own may not be registered here; those have to be told of as what the tool does without.
    check({knob: value for knob, value in config.items() if knob in off}, _ANY)
    task = str(result.workload.get("task") or "custom")
    adapted = config["lora_rank"] and task in HUGGING_FACE
    layers = _Layers.of(model, config, task) if model and adapted else _Layers()
    return ExportSource(
        model=result.model,
        config=config,
        hardware=hardware,
        task=task,
        sequence_length=result.workload.get("sequence_length"),
        effective_batch_size=result.workload.get("effective_batch_size"),
        measured=measured or None,
        predicted=predicted or None,
        versions=result.versions,
        weights=_weights(result.source),
        targets=layers.targets,
        outputs=layers.outputs,
        heads=layers.heads,
        off=off,
    )


def _factory(result: Result | SavedResult) -> Factory | None:
    """What makes the model again; None where the result cannot notify, or only a user's own code could."""
    if result.source.get("kind") not in ("preset", "directory", "hub"):
        return None
    length, effective = (result.workload.get(name) for name in ("sequence_length", "effective_batch_size"))
    return workload_from_source(result.source, sequence_length=length, effective_batch_size=effective).model


def _weights(source: Mapping[str, Any]) -> str:
    """The hub id or the directory of the weights, as far as the source tells."""
    kind = source.get("kind")
    if kind == "preset" and source.get("model") in preset_names():
        return load_preset(str(source["model"])).hub or WEIGHTS
    return str(source.get({"hub": "model", "directory": "path"}.get(str(kind), "")) or WEIGHTS)


@dataclass(frozen=True)
class _Layers:
    """Names of layers: those that get adapters, those of them that make the outputs, those trained whole."""

    targets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @classmethod
    def of(cls, factory: Factory, config: Config, task: str) -> _Layers:
        model = meta_model_from(factory)
        modules = dict(model.named_modules())
        heads = output_heads(model)
        wanted = adapter_targets(model, str(config["lora_targets"] or "all-linear"))
        made = [name for name in wanted if modules[name] in heads]
        return cls(
            targets=short_names(wanted, modules),
            outputs=short_names(made, modules),
            heads=tuple(name for name, each in modules.items() if each in heads and task in CLASSIFICATION_TASKS),
        )


def short_names(wanted: Collection[str], names: Collection[str]) -> tuple[str, ...]:
    """The fewest endings that stand for all wanted names and for no other, as peft matches them.

    An ending is as short as it can be: `q_proj`, but `output.dense` where an unwanted `dense` is there too.
    """
    others = [name for name in names if name not in wanted]
    endings: dict[str, None] = {}
    for name in wanted:
        parts = name.split(".")
        candidates = (".".join(parts[start:]) for start in reversed(range(len(parts))))
        endings[next((each for each in candidates if not _stands_for_one(each, others)), name)] = None
    return tuple(endings)


def _stands_for_one(ending: str, names: Collection[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for name in names)
