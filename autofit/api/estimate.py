"""`autofit.estimate`: predicts what a config needs and how fast it is; only the speed of a CPU is
measured."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import autofit.report.html  # noqa: F401 - shows an Estimate in a notebook
from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, unknown
from autofit.core.estimate import Estimate
from autofit.core.hardware import Hardware
from autofit.core.options import search_options, single_values
from autofit.core.result import knobs_of
from autofit.core.tasks import TASKS
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.core.workload import Workload
from autofit.estimate.resting import resting_of
from autofit.estimate.trace import trace
from autofit.hardware.budgets import budget_for
from autofit.models import resolve
from autofit.training.workload import with_known_rows
from autofit.tuning.target import estimate_on, structure_traits, target_hardware

ConfigSource = Mapping[str, Any] | str | Path | None

SIZES = (
    "task",
    "teacher",
    "seq_len",
    "resolution",
    "frames",
    "train_text_encoders",
    "effective_batch",
    "trust_remote_code",
    "loss_options",
)
_OPTIONS = ("gpu", "gpu_mem", "device", "mem", "devices", "nodes", "link", "set", *SIZES)

# Where people begin with a language model or a denoiser; its precision is the first that the card can compute in.
_START = {"micro_batch_size": 1, "activation_checkpointing": "full"}
_START_PRECISIONS = ("bf16", "fp16-mixed", "fp32")


@dataclass(frozen=True)
class Prediction:
    """The estimate of a config, and what it is of.

    Attributes:
        operators: how many of the step were followed, which is how long others like it take.
        processes: that predict what surrounds it, as of Workers.
    """

    workload: Workload
    hardware: Hardware
    budget: Budget
    estimate: Estimate
    operators: int
    processes: int | None = 1

    def to_dict(self) -> dict[str, Any]:
        """The object of `autofit estimate --json`, in which the alternatives are still None."""
        device = self.hardware.device
        return {
            "schema": 1,
            "model": self.workload.name,
            "workload": self.workload.summary(),
            "hardware": {"device": device, "name": self.hardware.name},
            "budget_bytes": self.budget.device_bytes,
            "usable_bytes": self.budget.cap_bytes(device),
            **self.estimate.to_dict(),
            "alternatives": None,
            "largest": None,
            "remedies": None,
        }


def estimate(model: str | Workload, config: ConfigSource = None, **options: Any) -> Estimate:
    """Predict memory and time of one config, without running it.

    Args:
        model: a preset's name (or directory, hub id, `file.py:function`), or a Workload.
        config: a mapping of knobs, or the path of one or of a result.yaml; absent knobs are off.
            None: a usual start, which a note names: for language models and denoisers bf16,
            micro-batches of one sample and full checkpointing, for others no knob.
        options: gpu, gpu_mem (GiB), device, mem (GiB), devices (of each node), nodes, link, task, teacher,
            seq_len, resolution, frames, train_text_encoders, effective_batch, set, trust_remote_code:
            as on the command line. The card named by `gpu` need not be here. loss_options: of the
            loss of the task, such as {"beta": 0.2}.

    Returns:
        The estimate; its `verdict` is on the memory given, or on that of the device.

    Raises:
        InputError: an argument is wrong; RefusedError: the config is not possible;
        UntraceableError: the model cannot be followed without its weights.
    """
    return predict(model, config, **options).estimate


def predict(
    model: str | Workload,
    config: ConfigSource = None,
    *,
    processes: int | None = 1,
    **options: Any,
) -> Prediction:
    """The estimate with what `what_if` needs to go on; takes the arguments of `estimate`.

    Args:
        processes: as of Workers; 1 where this process has opened a GPU, which none forked from it
            could use.
    """
    for name in options:
        if name not in _OPTIONS:
            raise unknown("option", name, _OPTIONS)
    sizes = {name: options.pop(name) for name in SIZES if name in options}
    checked = search_options(**options)
    if config is not None:
        config = knobs_of(config)
    single_values(checked.set)  # raises before what takes longer

    hardware, hardware_notes = target_hardware(checked)
    budget = budget_for(checked, hardware)
    workload = workload_of(model, hardware, **sizes)
    canonical, config_notes = config_of(config, checked.set, workload, hardware)
    if torch.cuda.is_initialized():
        processes = 1

    traced = trace(workload, canonical, hardware, processes=processes)
    predicted = estimate_on(traced, workload, hardware, budget)

    assert workload.traits is not None, "workload_of finds them"
    notes = (*workload.traits.notes, *config_notes, *hardware_notes, *predicted.notes)
    predicted = dataclasses.replace(
        predicted,
        notes=notes,
        resting=resting_of(traced, workload, hardware),
    )
    return Prediction(
        workload,
        hardware,
        budget,
        predicted,
        operators=len(traced.costs),
        processes=processes,
    )


def workload_of(
    model: str | Workload,
    hardware: Hardware,
    *,
    task: str | None = None,
    teacher: str | None = None,
    seq_len: int | None = None,
    resolution: str | int | None = None,
    frames: int | None = None,
    train_text_encoders: bool = False,
    effective_batch: int | None = None,
    trust_remote_code: bool = False,
    loss_options: Mapping[str, Any] | None = None,
) -> Workload:
    """The workload with the traits that the model's structure shows."""
    encoders = None if train_text_encoders is False else train_text_encoders
    sizes = (seq_len, resolution, frames, encoders, effective_batch)
    of_names = (task, teacher, *sizes, loss_options)
    if isinstance(model, str):
        model = resolve(
            model,
            task=task,
            teacher=teacher,
            trust_remote_code=trust_remote_code,
            sequence_length=seq_len,
            resolution=resolution,
            frames=frames,
            train_text_encoders=train_text_encoders,
            effective_batch_size=effective_batch,
            loss_options=loss_options,
        )
    elif not isinstance(model, Workload):
        kind = type(model).__name__
        message = f"the model must be a name or an autofit.Workload, not a {kind}."
        remedy = "Write autofit.Workload(model=lambda: ..., batch=lambda n: ...)."
        raise InputError(message, remedy)
    elif any(given is not None for given in of_names):
        message = (
            "task, teacher, seq_len, resolution, frames, train_text_encoders, effective_batch and "
            "loss_options belong to a model given by name."
        )
        raise InputError(message, "The Workload says them.")

    workload = with_known_rows(model)
    if workload.traits is None:
        workload = dataclasses.replace(workload, traits=structure_traits(workload, hardware))
    return workload


def config_of(
    source: ConfigSource,
    settings: Mapping[str, tuple[Value, ...]],
    workload: Workload,
    hardware: Hardware,
) -> tuple[Config, tuple[str, ...]]:
    """The canonical config with the settings on top, and a note where it is a usual start."""
    changes = single_values(settings)

    def changed(config: Mapping[str, Any]) -> Config:
        return techniques.canonicalize(with_changes(changes, config), workload, hardware)

    if source is not None:
        return changed(knobs_of(source)), ()

    layout = {"data_parallel": "fsdp"} if hardware.world > 1 else {}
    starts = [changed(layout)]
    task = TASKS[workload.task]
    if task.of_language_models or task is DIFFUSION:
        starts = [changed({**_START, **layout, "precision": name}) for name in _START_PRECISIONS]
    chosen = starts[0]
    for config in starts:
        if techniques.refuse(config, workload, hardware) is None:
            chosen = config
            break

    given = "no config was given"
    if changes:
        given = f"only {', '.join(sorted(changes))} of the config was given"
    note = f"{given}: the other knobs are where training such a model usually starts."
    return chosen, (note,)


def with_changes(changes: Mapping[str, Value], config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with some knobs changed; gradient accumulation follows the micro-batch size."""
    changed = {**config, **changes}
    if "micro_batch_size" in changes and "gradient_accumulation_steps" not in changes:
        changed.pop("gradient_accumulation_steps", None)
    return changed
