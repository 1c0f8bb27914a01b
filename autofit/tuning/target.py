"""The hardware that a prediction is for, which need not be here, and the estimate of a trace on
it."""

import dataclasses

import torch

from autofit.core.budget import Budget, gib_to_bytes
from autofit.core.errors import InputError, as_input_error, describe_error
from autofit.core.estimate import Estimate
from autofit.core.hardware import Hardware
from autofit.core.options import ALL, SearchOptions
from autofit.core.workload import Traits, Workload
from autofit.estimate.calibration import calibration_for
from autofit.estimate.estimator import estimate_of
from autofit.estimate.rates import rates_for
from autofit.estimate.step_trace import Trace
from autofit.hardware.budgets import budget_for, budget_notes
from autofit.hardware.catalogue import card, hardware_of, link, most_common_card, sold_bytes
from autofit.hardware.device import detect
from autofit.probe import LocalExecutor
from autofit.training.inspect import inspect_workload


def target_hardware(options: SearchOptions) -> tuple[Hardware, tuple[str, ...]]:
    """The hardware to predict for, and notes on what is assumed of it.

    Raises an InputError for CUDA without a card, a size or a device here.
    """
    if options.devices == ALL:
        raise InputError(
            "--devices all means the cards of this machine; a prediction is for any.",
            "Give a number.",
        )
    if options.link is not None:
        link(options.link)

    hardware, notes = _one_device(options)
    return hardware.of_several(int(options.devices), options.nodes, options.link), notes


def _one_device(options: SearchOptions) -> tuple[Hardware, tuple[str, ...]]:
    if options.gpu is not None:
        return hardware_of(card(options.gpu)), ()

    notes: tuple[str, ...] = ()
    if options.wanted_device != "cpu" and torch.cuda.is_available():
        with LocalExecutor() as executor:
            hardware = executor.detect("cuda")
    elif options.wanted_device != "cuda":
        hardware = detect("cpu")
    elif options.gpu_mem is None:
        raise InputError(
            "there is no CUDA device here.",
            "Name a card (--gpu rtx-4090) or a size (--gpu-mem 24).",
        )
    else:
        assumed = most_common_card(options.gpu_mem)
        hardware = hardware_of(assumed)
        if assumed.sold_gb < options.gpu_mem:
            note = (
                f"few cards have {options.gpu_mem:g} GiB, so one as fast as {assumed.title} is "
                "assumed."
            )
        else:
            note = (
                f"{assumed.title}, the most common one of {assumed.sold_gb} GB, is assumed; --gpu "
                "names another."
            )
        notes = (f"No card was named: {note}",)

    asked = options.mem if options.wanted_device == "cpu" else options.gpu_mem
    if asked is not None:
        asked_bytes = gib_to_bytes(asked)
        largest = hardware.memory_bytes if hardware.device == "cpu" else sold_bytes(hardware)
        if asked_bytes > largest:  # the target need not be here: a larger device is meant
            return dataclasses.replace(hardware, memory_bytes=asked_bytes, used_bytes=0), notes

    return hardware, (*notes, *budget_notes(options, hardware, budget_for(options, hardware)))


def structure_traits(workload: Workload, hardware: Hardware) -> Traits:
    """What the structure of the model shows."""
    # The model may be of a size that no machine has.
    with as_input_error(lambda error: f"the model cannot be built here: {describe_error(error)}."):
        return inspect_workload(workload, hardware, budget_bytes=None)


def estimate_on(traced: Trace, workload: Workload, hardware: Hardware, budget: Budget) -> Estimate:
    """The estimate of a trace on a device, with its rates and calibration."""
    estimate = estimate_of(
        traced,
        workload,
        hardware,
        rates=rates_for(hardware),
        calibration=calibration_for(hardware, traced.config),
    )
    return dataclasses.replace(estimate, budget=budget)
