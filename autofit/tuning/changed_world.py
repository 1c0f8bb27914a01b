"""Refits a config that was found for another number of devices to those that are here.

A child process predicts what fits, before the ranks start, which could not predict. It gets a copy
of the model without weights, so that the caller's model is not touched.
"""

import dataclasses
from collections.abc import Mapping

from torch import nn

from autofit.core.budget import Budget, gib_to_bytes
from autofit.core.config import Value
from autofit.core.errors import AutofitError, RefusedError, pluralize
from autofit.core.estimate import Estimate
from autofit.core.events import Listener, Note
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout, dividing, fitted_to, fitted_where, part_of
from autofit.core.options import SearchOptions
from autofit.core.workload import Workload
from autofit.estimate.calibration import calibration_for
from autofit.estimate.estimator import estimate_of
from autofit.estimate.trace import trace
from autofit.hardware.budgets import budget_for
from autofit.probe import LocalExecutor
from autofit.report.formatting import gib
from autofit.training.workload import without_weights

_SECONDS = 300.0  # for following one step


def is_of_another_world(config: Mapping[str, Value], world: int) -> bool:
    """Whether a config says, by its degrees, that it is for another number of devices."""
    return "data_parallel_shard" in config and Layout.of(config).world != world


def refit_to_devices(
    config: Mapping[str, Value],
    world: int,
    workload: Workload,
    model: nn.Module,
    *,
    options: SearchOptions,
    listener: Listener,
) -> tuple[int, dict[str, Value]]:
    """The devices to train on, at most `world`, and the config for them.

    Of the numbers of devices that divide the batch it is the largest on which the config is
    predicted to fit, with smaller micro-batches if need be. A note says what had to change. Where
    nothing can be predicted, or nothing fits, it trains as it is, and takes smaller slices when
    memory runs out.

    Args:
        options: the budget of each device, at most what is free; other options count for nothing.
    """
    effective = workload.effective_batch_size
    size = dividing(config, world, effective)[0]
    plain = size, fitted_to(config, size, effective)
    estimates: list[Estimate] = []

    try:
        copy = without_weights(workload, model)
        with LocalExecutor() as executor:
            hardware = executor.detect(options.wanted_device)

            def fits(devices: int, knobs: dict[str, Value]) -> bool:
                several = hardware.of_several(devices)
                try:
                    estimate = executor.run(
                        estimate_on_budget,
                        copy,
                        knobs,
                        several,
                        free_budget(options, several),
                        log="estimate.log",
                        timeout=_SECONDS,
                    )
                except RefusedError:
                    if not estimates:
                        raise
                    return False

                estimates.append(estimate)
                return bool(estimate.verdict != "no")

            found = fitted_where(config, world, effective, fits)
    except AutofitError as error:
        devices = pluralize(size, "device")
        why = f"whether this config fits {devices} could not be predicted: {error.message}"
        listener(Note(why))
        return plain

    if found != plain:
        first = estimates[0]
        assert first.budget, "it was predicted for one"
        usable = gib(first.budget.cap_bytes(hardware.device))
        instead = "nothing smaller fits, so it trains as it is"
        if found:
            instead = f"it trains on {_describe(*found, effective)}"
        listener(
            Note(
                f"on {_describe(*plain, effective)} at least {gib(first.low)} of {usable} GiB "
                f"would be needed: {instead}."
            )
        )
    return found or plain


def estimate_on_budget(
    workload: Workload, knobs: Mapping[str, Value], hardware: Hardware, budget: Budget
) -> Estimate:
    """The estimate of a config, which carries the budget."""
    traced = trace(workload, knobs, hardware)
    calibration = calibration_for(hardware, traced.config)
    found = estimate_of(traced, workload, hardware, rates=None, calibration=calibration)
    return dataclasses.replace(found, budget=budget)


def free_budget(options: SearchOptions, hardware: Hardware) -> Budget:
    """What was asked for, and no more than is free."""
    free = budget_for(SearchOptions(device=hardware.device, margin=options.margin), hardware)
    asked = options.mem if hardware.device == "cpu" else options.gpu_mem
    if asked is None:
        return free

    device_bytes = min(free.device_bytes, gib_to_bytes(asked))
    return dataclasses.replace(free, device_bytes=device_bytes)


def _describe(devices: int, knobs: Mapping[str, Value], effective: int) -> str:
    micro = knobs.get("micro_batch_size") or part_of(knobs, devices, effective)
    return f"{pluralize(devices, 'device')} with micro-batches of {micro}"
