"""What a probe's child process does: open what the parent sent, measure one Config, and say how it ended."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from autofit.core.budget import Budget
from autofit.core.errors import AutofitError, InputError, ProbeError, RefusedError
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Traits, Workload
from autofit.hardware.device import detect, used_bytes_without_context, visible_cards
from autofit.hardware.out_of_memory import is_device_out_of_memory, is_host_out_of_memory, is_out_of_memory
from autofit.probe.on_cpu import CpuProbe
from autofit.probe.on_cuda import CudaProbe, check_room, open_card
from autofit.probe.steps import LossDivergedError, Probe, Request
from autofit.techniques import register
from autofit.training.inspect import inspect_workload

_IDLE = GIB  # of a card in use by others, such as a desktop: what computes takes more


def serve(function: Callable[..., Any], workload: bytes, arguments: bytes) -> Any:
    """Open what the parent sent, here, where the user's modules are imported, and call `function` with it.

    Errors that are the user's to mend come back as values.
    """
    try:
        opened = pickle.loads(workload)
        rest = pickle.loads(arguments)
    except Exception as error:
        message = f"the workload cannot be opened in a probe process: {type(error).__name__}: {error}."
        remedy = "Define its functions in a module that can be imported, or in the notebook or script itself."
        return InputError(message, remedy)
    try:
        return function(opened, *rest)
    except AutofitError as error:
        return error


def look_around(_: Workload | None, device: str | None) -> Hardware:
    """The hardware alone."""
    return detect(device)


def look_for_cards(_: Workload | None) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES calls the cards that are visible."""
    return visible_cards()


def look_at_card(_: Workload | None, card: str) -> Hardware:
    """One of the visible cards; a ProbeError where others use it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    used = used_bytes_without_context()
    if used > _IDLE:
        raise ProbeError(f"others use {used / GIB:.1f} GiB of card {card}.")
    return detect("cuda")


def look(workload: Workload, device: str | None, budget_bytes: int | None) -> tuple[Hardware, Traits]:
    """The hardware, and the traits of the workload on it."""
    hardware = detect(device)
    on_cpu = hardware.device == "cpu"
    free = hardware.host_free_bytes if on_cpu else hardware.memory_bytes - hardware.used_bytes
    return hardware, inspect_workload(workload, hardware, min(budget_bytes or free, free))


def look_for_room(_: Workload | None, budget: Budget, hardware: Hardware) -> None:
    """A ProbeError where others leave the card less than the budget allows."""
    check_room(open_card(), budget, hardware)


def measure(workload: Workload, request: Request) -> Measurement:
    """Measure one Config; every way a run can end comes back as an Outcome, never as an exception.

    Raises:
        ProbeError: the device cannot be used, or had less memory than the budget allows, so that nothing was measured.
    """
    start = time.monotonic()
    for technique in request.techniques:
        register(technique)
    probe = probe_of(workload, request)
    outcome, reason = Outcome.FITS, None
    try:
        probe.run()
        outcome, reason = probe.verdict()
    except RefusedError as error:
        outcome, reason = Outcome.REFUSED, str(error)
    except LossDivergedError as error:
        outcome, reason = Outcome.DIVERGED, str(error)
    except AutofitError as error:
        outcome, reason = Outcome.FAILED, str(error)
    except Exception as error:
        outcome, reason = _classify(_first(error), request)
    if outcome is Outcome.OUT_OF_MEMORY:
        probe.check_room()
    return probe.measurement(outcome, reason, time.monotonic() - start)


def probe_of(workload: Workload, request: Request) -> Probe:
    """The probe of the device that was asked for; it puts this process under the cap.

    Raises:
        ProbeError: the device cannot be used.
    """
    return (CudaProbe if request.hardware.device == "cuda" else CpuProbe)(workload, request)


def _first(error: BaseException) -> BaseException:
    """The error by which a device ended, where one did: after it every call fails, and what cleans up reports that."""
    chain = [error]
    while chain[-1].__context__:
        chain.append(chain[-1].__context__)
    ends = [each for each in chain if isinstance(each, torch.AcceleratorError) and not is_out_of_memory(each)]
    return ends[-1] if ends else error


def _classify(error: BaseException, request: Request) -> tuple[Outcome, str]:
    if is_device_out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, f"needs more than {request.budget.device_bytes / GIB:.2f} GiB"
    if is_host_out_of_memory(error):
        if request.hardware.device == "cpu":
            return Outcome.OUT_OF_MEMORY, "ran into the resource limit that guards the machine"
        return Outcome.HOST_OUT_OF_MEMORY, "the host could not give more memory"
    traceback.print_exc()
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    if isinstance(error, torch.AcceleratorError):  # its first line says what it is; how to debug PyTorch follows
        del lines[len(lines) - len(str(error).strip().splitlines()) + 1 :]
    return Outcome.FAILED, "\n".join(lines[-12:])
