"""Where a config that was found for another number of devices trains: on as many as it is predicted to fit.

Asked before the ranks start, which could not predict, in a child process and of a copy of the model without weights, so
that the caller's is not touched.
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
    """So many devices of this machine, or fewer, and the config for them: of those that divide the batch the most on
    which it is predicted to fit, with smaller micro-batches if need be. A note says what had to change. Where nothing
    can be predicted, or nothing fits, it trains as it is, and takes smaller slices when memory runs out.

    Args:
        options: the budget of each device, at most what is free; the rest of them counts for nothing.
    """
    effective = workload.effective_batch_size
    size = dividing(config, world, effective)[0]
    plain = size, fitted_to(config, size, effective)
    seen: list[Estimate] = []

    def notify(text: str) -> None:
        listener(Note(f"{text}."))

    try:
        copy = without_weights(workload, model)
        with LocalExecutor() as executor:
            hardware = executor.detect(options.wanted_device)

            def fits(devices: int, knobs: dict[str, Value]) -> bool:
                here = hardware.of_several(devices)
                asked = knobs, here, _budget(options, here)
                try:
                    seen.append(
                        executor.run(_estimate, copy, *asked, log="estimate.log", timeout=_SECONDS)
                    )
                except RefusedError:
                    if not seen:
                        raise
                    return False
                return seen[-1].verdict != "no"

            found = fitted_where(config, world, effective, fits)
    except AutofitError as error:
        notify(
            f"whether this config fits {pluralize(size, 'device')} could not be predicted: {error.message[:-1]}"
        )
        return plain
    if found != plain:
        first, asked = seen[0], _told(*plain, effective)
        assert first.budget, "it was predicted for one"
        usable = gib(first.budget.cap_bytes(hardware.device))
        instead = (
            f"it trains on {_told(*found, effective)}"
            if found
            else "nothing smaller fits, so it trains as it is"
        )
        notify(f"on {asked} at least {gib(first.low)} of {usable} GiB would be needed: {instead}")
    return found or plain


def _estimate(
    workload: Workload, knobs: Mapping[str, Value], hardware: Hardware, budget: Budget
) -> Estimate:
    traced = trace(workload, knobs, hardware)
    calibration = calibration_for(hardware, traced.config)
    found = estimate_of(traced, workload, hardware, rates=None, calibration=calibration)
    return dataclasses.replace(found, budget=budget)


def _budget(options: SearchOptions, hardware: Hardware) -> Budget:
    """What was asked for, and no more than is free."""
    free = budget_for(SearchOptions(device=hardware.device, margin=options.margin), hardware)
    asked = options.mem if hardware.device == "cpu" else options.gpu_mem
    device_bytes = (
        free.device_bytes if asked is None else min(free.device_bytes, gib_to_bytes(asked))
    )
    return dataclasses.replace(free, device_bytes=device_bytes)


def _told(devices: int, knobs: Mapping[str, Value], effective: int) -> str:
    micro = knobs.get("micro_batch_size") or part_of(knobs, devices, effective)
    return f"{pluralize(devices, 'device')} with micro-batches of {micro}"
