"""Predictions for people: what one config needs and how fast it is, what changing it would bring, which cards it fits.

Joins what the estimator says with the models, the catalogue of cards and the budget, as `tune` joins the search with
the probes. Nothing is measured but the speed of the CPU at hand; no GPU and no weights are needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autofit import techniques
from autofit.core.budget import Budget, gib_to_bytes
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, unknown
from autofit.core.estimate import Estimate
from autofit.core.hardware import Hardware
from autofit.core.options import SearchOptions, search_options
from autofit.core.result import SavedResult
from autofit.core.strict_yaml import load_mapping
from autofit.core.workload import Workload
from autofit.estimate.calibration import calibration_for
from autofit.estimate.estimator import estimate_of
from autofit.estimate.rates import rates_for
from autofit.estimate.trace import Trace, trace
from autofit.hardware.budgets import budget_for, budget_notes
from autofit.hardware.catalogue import Card, card, hardware_of, most_common_card, sold_bytes
from autofit.hardware.device import detect
from autofit.models import resolve
from autofit.probe import LocalExecutor
from autofit.training.inspect import inspect_workload

Given = Mapping[str, Any] | str | Path | None

_OPTIONS = ("gpu", "gpu_mem", "device", "mem", "set")
_START = {"micro_batch_size": 1, "activation_checkpointing": "full"}  # where people begin with a language model
_START_PRECISIONS = ("bf16", "fp16-mixed", "fp32")  # the first one that the card can compute in


def estimate(model: str | Workload, config: Given = None, **options: Any) -> Estimate:
    """Predict memory and time of one config, without running it.

    Args:
        model: a preset's name (or directory, hub id, `file.py:function`), or a Workload.
        config: a mapping of knobs, or the path of one or of a result.yaml; absent knobs are off. None: where one would
            start from, as a note says: for language models bf16, micro-batches of one sample and full checkpointing,
            for others no knob.
        options: gpu, gpu_mem (GiB), device, mem (GiB), seq_len, effective_batch, set, trust_remote_code: as on the
            command line. A card that is named by `gpu` need not be here.

    Returns:
        The estimate; its `verdict` is on the memory given, or on that of the device.

    Raises:
        InputError: something given is wrong; RefusedError: the config cannot be; UntraceableError: the model cannot be
        followed without its weights.
    """
    return ask(model, config, **options).estimate


def ask(
    model: str | Workload,
    config: Given = None,
    *,
    seq_len: int | None = None,
    effective_batch: int | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Prediction:
    """What `estimate` predicts, with all that can be asked about it further; the arguments are the same."""
    for name in options:
        if name not in _OPTIONS:
            raise unknown("option", name, (*_OPTIONS, "seq_len", "effective_batch", "trust_remote_code"))
    checked = search_options(**options)
    hardware, notes = hardware_for(checked)
    budget = budget_for(checked, hardware)
    workload = workload_of(
        model, hardware, seq_len=seq_len, effective_batch=effective_batch, trust_remote_code=trust_remote_code
    )
    settled, said = config_of(config, checked.set, workload, hardware)
    found = on_device(trace(workload, settled, hardware), workload, hardware, budget)
    return Prediction(workload, hardware, budget, dataclasses.replace(found, notes=(*said, *notes, *found.notes)))


@dataclass(frozen=True)
class Prediction:
    """The estimate of a config, and what it was asked about."""

    workload: Workload
    hardware: Hardware
    budget: Budget
    estimate: Estimate

    def to_dict(self) -> dict[str, Any]:
        """The object of `autofit estimate --json`, without what takes longer."""
        return {
            "schema": 1,
            "model": self.workload.name,
            "workload": self.workload.summary(),
            "hardware": {"device": self.hardware.device, "name": self.hardware.name},
            "budget_bytes": self.budget.device_bytes,
            "usable_bytes": self.budget.cap_bytes(self.hardware.device),
            **self.estimate.to_dict(),
            "alternatives": None,
            "largest": None,
        }


def workload_of(
    model: str | Workload,
    hardware: Hardware,
    *,
    seq_len: int | None = None,
    effective_batch: int | None = None,
    trust_remote_code: bool = False,
) -> Workload:
    """The workload, with what a look at the model's structure tells."""
    if isinstance(model, str):
        model = resolve(
            model, sequence_length=seq_len, effective_batch_size=effective_batch, trust_remote_code=trust_remote_code
        )
    elif not isinstance(model, Workload):
        message = f"the model must be a name or an autofit.Workload, not a {type(model).__name__}."
        raise InputError(message, "Write autofit.Workload(model=lambda: ..., batch=lambda n: ...).")
    elif seq_len is not None or effective_batch is not None:
        message = "seq_len and effective_batch belong to a model given by name."
        raise InputError(message, "The Workload says them.")
    if model.traits is not None:
        return model
    traits = inspect_workload(model, hardware, budget_bytes=0)  # which leaves no room for trying the loss
    return dataclasses.replace(model, traits=dataclasses.replace(traits, notes=()))


def hardware_for(options: SearchOptions) -> tuple[Hardware, tuple[str, ...]]:
    """What to predict for, and what was assumed of it."""
    if options.gpu:
        return hardware_of(card(options.gpu)), ()
    wanted = options.mem if options.wanted_device == "cpu" else options.gpu_mem
    needed = 0 if wanted is None else gib_to_bytes(wanted)
    notes: tuple[str, ...] = ()
    if options.wanted_device != "cpu" and torch.cuda.is_available():
        with LocalExecutor() as executor:
            here = executor.detect("cuda")
    elif options.wanted_device != "cuda":
        here = detect("cpu")
    elif options.gpu_mem is None:
        raise InputError("there is no CUDA device here.", "Name a card (--gpu rtx-4090) or a size (--gpu-mem 24).")
    else:
        assumed = most_common_card(options.gpu_mem)
        here, notes = hardware_of(assumed), (_assumed(assumed, options.gpu_mem),)
    # What a prediction is for need not be here: a larger budget than there is memory means a larger device.
    if needed > (here.memory_bytes if here.device == "cpu" else sold_bytes(here)):
        return dataclasses.replace(here, memory_bytes=needed, used_bytes=0), notes
    return here, (*notes, *budget_notes(options, here, budget_for(options, here)))


def _assumed(target: Card, gib: float) -> str:
    if target.sold_gb < gib:
        return f"No card was named, and few have {gib:g} GiB: one as fast as {target.title} is assumed."
    common = f"{target.title}, the most common one of {target.sold_gb} GB"
    return f"No card was named: {common}, is assumed; --gpu names another."


def config_of(
    given: Given, settings: Mapping[str, tuple[Value, ...]], workload: Workload, hardware: Hardware
) -> tuple[Config, tuple[str, ...]]:
    """The canonical config, and a note where it was not given."""
    for knob, values in settings.items():
        if len(values) != 1:
            message = f"{knob} is set to {len(values)} values, and a config has one."
            raise InputError(message, "Give one; autofit search takes several.")
    changes = {knob: values[0] for knob, values in settings.items()}
    if given is not None:
        return techniques.canonicalize(with_changes(changes, _knobs(given)), workload, hardware), ()
    config = _start(changes, workload, hardware)
    start = "this one is where the training of such a model would start"
    known = (
        f"of a config only {', '.join(sorted(changes))} was given: with that," if changes else "no config was given:"
    )
    return config, (f"{known} {start}.",)


def _start(changes: Mapping[str, Value], workload: Workload, hardware: Hardware) -> Config:
    """Where one would start from; one that is refused where all are."""
    if workload.task != "causal-lm":
        return techniques.canonicalize(changes, workload, hardware)
    starts = [
        techniques.canonicalize(with_changes(changes, {**_START, "precision": each}), workload, hardware)
        for each in _START_PRECISIONS
    ]
    return next((each for each in starts if techniques.refuse(each, workload, hardware) is None), starts[0])


def _knobs(given: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The knobs of a config file, of a result.yaml, or as they were given."""
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, str | Path):
        message = f"config must be an autofit.Config, a mapping of knobs or a path, not a {type(given).__name__}."
        raise InputError(message, "Or leave it out.")
    path = Path(given).expanduser()
    data = load_mapping(path)
    return SavedResult.load(path).config if {"autofit", "config"} & data.keys() else data


def with_changes(changes: Mapping[str, Value], config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with some knobs changed; what follows from the micro-batch is left to follow."""
    changed = {**config, **changes}
    if "micro_batch_size" in changes and "gradient_accumulation_steps" not in changes:
        changed.pop("gradient_accumulation_steps", None)
    return changed


def on_device(traced: Trace, workload: Workload, hardware: Hardware, budget: Budget) -> Estimate:
    """What a trace comes to on a device, by all that is known of it."""
    known = calibration_for(hardware)
    found = estimate_of(traced, workload, hardware, rates=rates_for(hardware), calibration=known)
    return dataclasses.replace(found, budget=budget)
