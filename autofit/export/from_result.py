"""From a result to another tool's files. The names of layers that get adapters come from the
model's structure, built again without weights; the name of the weights, from the preset or
directory that was searched."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, require
from autofit.core.estimate import Estimate
from autofit.core.files import expanded, write_atomically
from autofit.core.hardware import GIB, Hardware
from autofit.core.result import Result, SavedResult, result_of
from autofit.core.task import TEACHER
from autofit.core.tasks import TASKS
from autofit.core.tasks.custom import CUSTOM
from autofit.core.workload import Workload
from autofit.export.pictures import pictures_of
from autofit.export.source import WEIGHTS, ExportSource
from autofit.export.tool import Export, write
from autofit.export.tools import all_tools, tool_named
from autofit.export.unsaid import unsaid
from autofit.models import load_preset, preset_names, workload_from_source
from autofit.models.diffusion.pipeline import DiffusersModel
from autofit.models.huggingface import PARTS, ROUNDS
from autofit.models.trained_parts import check_parts
from autofit.report.explain import nothing_fits
from autofit.setup.experts import expert_weights
from autofit.setup.layers import output_heads
from autofit.techniques import all_techniques, check
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.meta_model import meta_model_from

Factory = Callable[[], Any]
LayerNames = dict[str, Any]

# For what holds on any hardware, as an export does.
ANY = Hardware(
    device="cuda",
    name="any",
    memory_bytes=0,
    host_memory_bytes=0,
    host_free_bytes=0,
    cores=1,
)


def export(
    result: Result | SavedResult | str | Path,
    *,
    to: str,
    output: str | Path | None = None,
    strict: bool = False,
    tool_version: str | None = None,
) -> Export:
    """Write the config of a result for another tool.

    Args:
        result: a search's result, or the path of a result.yaml.
        to: a tool, such as "axolotl".
        output: the file to write; other files of the tool are written beside it. Without it,
            nothing is written.
        strict: refuse a config that the tool cannot run as it was measured.
        tool_version: of the tool; default: the one that the config was measured with, else the
            newest known.

    Raises:
        InputError: no such tool, one that cannot train this, a value that a knob never takes, or,
            when strict, a tool that deviates from what was measured.
        NothingFitsError: a result without a config.
    """
    tool = tool_named(to)
    require(isinstance(strict, bool), "strict must be True or False", strict)
    result = result_of(result)
    model = None
    # others only the user's own code can build
    if result.source.get("kind") in ("preset", "directory", "hub"):
        model = workload_from_source(result.source, result.workload).model

    path = None
    file = ""
    if output is not None:
        path = expanded(output, "output")
        file = path.name

    export = write(tool, _source(result, model), tool_version, file)
    if strict and export.departures:
        departures = " ".join(map(str, export.departures))
        message = f"{tool.title} cannot run all of this config as measured: {departures}"
        raise InputError(message, "Leave out --strict to accept it.")

    if path is not None:
        _save(export, path)

    return export


def export_all(
    result: Result,
    model: Factory,
    directory: Path,
    *,
    notify: Callable[[str], None],
    layers: LayerNames | None = None,
) -> None:
    """Write the config of a result for every tool that can train it; `notify` hears of those that
    refuse it.

    `layers`: as of `layer_names`, where they are known already.
    """
    source = _source(result, model, layers)
    for tool in all_tools():
        if tool.why_not(source):
            continue
        try:
            files = write(tool, source).files
        except InputError as error:
            notify(f"not exported to {tool.title}: {error.message}")
            continue

        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)


def _save(export: Export, output: Path) -> None:
    """Write the first file under the given name, and the others, which may refer to it, beside
    it."""
    first, *_ = export.files
    for name, text in export.files.items():
        path = output
        if name != first:
            path = output.with_name(Path(name).name)

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror}."
            raise InputError(message, "Choose another --output.") from error


def _saved(result: Result | SavedResult) -> SavedResult:
    """A result as a result.yaml has it.

    Raises:
        NothingFitsError: the result has no config.
    """
    if isinstance(result, SavedResult):
        return result
    if result.config is None:
        raise nothing_fits(result)

    measured = {}
    predicted = {}
    if result.best:
        measured = result.best.to_measured()
    if result.predicted_best:
        predicted = result.predicted_best.to_predicted()

    return SavedResult(
        model=result.model,
        workload=result.workload,
        source=result.source,
        hardware=_facts(result.hardware, result.budget),
        config=result.config,
        measured=measured,
        versions=result.versions,
        predicted=predicted,
    )


def _source(
    result: Result | SavedResult,
    model: Factory | None,
    layers: LayerNames | None = None,
) -> ExportSource:
    """What exporters are given of a result.

    Args:
        model: makes the model; None: only the user's own code can.
        layers: as of `layer_names`, where they are known already.

    Raises:
        NothingFitsError: the result has no config.
        InputError: a knob never takes the value that it has.
    """
    saved = _saved(result)
    off = {technique.name: technique.off for technique in all_techniques()}
    config = Config({**off, **saved.config})
    # A user's own technique may not be registered here; the tool then deviates on it.
    check({knob: value for knob, value in config.items() if knob in off}, ANY)

    workload = saved.workload
    task = str(workload.get("task") or CUSTOM.name)
    if layers is None:
        layers = {}
        if model is not None:
            layers = layer_names(model, config, task)

    pictures = None
    if isinstance(model, DiffusersModel):
        pictures = pictures_of(model, saved.source)

    return ExportSource(
        model=saved.model,
        config=config,
        hardware=saved.hardware,
        task=task,
        sequence_length=workload.get("sequence_length"),
        effective_batch_size=workload.get("effective_batch_size"),
        packing=workload.get("packing"),
        data=workload.get("data"),
        form=workload.get("form"),
        apart=bool(workload.get("document_tokens")),
        measured=saved.measured or None,
        predicted=saved.predicted or None,
        versions=saved.versions,
        weights=_weights(saved.source),
        teacher=_weights(saved.source.get(TEACHER) or {}),
        loss_options=saved.source.get("loss_options") or {},
        off=off,
        rounds=ROUNDS in saved.source,
        unsaid=unsaid(saved.source),
        parts=check_parts(saved.source.get(PARTS, ())),
        own_loss=workload.get("own_loss"),
        pictures=pictures,
        **layers,
    )


def planned_source(
    workload: Workload,
    estimate: Estimate,
    hardware: Hardware,
    budget: Budget,
    generation: Mapping[str, Any],
) -> ExportSource:
    """What is exported of a config that was planned: only predicted, with keys of how samples are
    generated."""
    off = {technique.name: technique.off for technique in all_techniques()}
    config = Config({**off, **estimate.config})
    return ExportSource(
        model=workload.name,
        config=config,
        hardware=_facts(hardware, budget),
        task=workload.task,
        sequence_length=workload.sequence_length,
        effective_batch_size=workload.effective_batch_size,
        predicted=estimate.to_predicted(),
        weights=_weights(workload.source),
        off=off,
        generation=generation,
        **layer_names(workload.model, config, workload.task),
    )


def _facts(hardware: Hardware, budget: Budget) -> dict[str, Any]:
    """The hardware with its budget, as a result.yaml has them."""
    budget_gib = round(budget.device_bytes / GIB, 3)
    return {**hardware.to_dict(), "budget_gib": budget_gib}


def _weights(source: Mapping[str, Any]) -> str:
    """The hub id or the directory of the weights, as far as the source names it."""
    kind = source.get("kind")
    if kind == "preset" and source.get("model") in preset_names():
        return load_preset(str(source["model"])).hub or WEIGHTS

    name = None
    if kind == "hub":
        name = source.get("model")
    elif kind == "directory":
        name = source.get("path")
    return str(name or WEIGHTS)


def layer_names(factory: Factory, config: Config, task: str) -> LayerNames:
    """What an ExportSource says of layers where adapters are trained.

    Importing a model's code takes seconds.
    """
    if not config.lora_rank or task not in TASKS or not TASKS[task].auto_classes:
        return {}

    model = meta_model_from(factory)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    heads = output_heads(model)
    targets, experts = adapter_targets(model, str(config.lora_targets or "all-linear"))

    outputs = [name for name in targets if modules[name] in heads]
    trained_whole: list[str] = []
    if TASKS[task].has_new_head:
        trained_whole = [name for name, module in modules.items() if module in heads]

    held_by_experts = {weight.full_name for weight in expert_weights(model)}
    return {
        "targets": short_names(targets, modules),
        "outputs": short_names(outputs, modules),
        "heads": tuple(trained_whole),
        "experts": short_names(held_by_experts, parameters),
        "adapted_experts": short_names(experts, parameters),
    }


def short_names(wanted: Collection[str], names: Collection[str]) -> tuple[str, ...]:
    """The fewest endings that match all wanted names and no other, as peft matches them.

    An ending is as short as possible: `q_proj`, but `output.dense` if another `dense` is not
    wanted.
    """
    others = [f".{name}" for name in names if name not in wanted]
    endings: dict[str, None] = {}
    for name in wanted:
        ending = ""
        for part in reversed(name.split(".")):
            ending = f".{part}{ending}"
            if not any(other.endswith(ending) for other in others):
                break

        endings[ending.removeprefix(".")] = None

    return tuple(endings)
