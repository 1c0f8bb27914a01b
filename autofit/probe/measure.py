"""What the child processes of an executor run: measure or trace one Config, inspect the workload
and the hardware."""

import contextlib
import dataclasses
import functools
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autofit.core.budget import Budget
from autofit.core.errors import (
    AutofitError,
    ProbeError,
    RefusedError,
    as_input_error,
    describe_error,
    message_of,
    printable,
)
from autofit.core.hardware import GIB, Hardware
from autofit.core.links import Link
from autofit.core.measurement import Measurement, Outcome
from autofit.core.place import Place
from autofit.core.workload import Traits, Workload
from autofit.distributed.group import Failure, failure_of, joined
from autofit.distributed.measured_link import measured_link
from autofit.distributed.stand_in import first_of
from autofit.hardware.device import detect, used_bytes_without_context, visible_cards
from autofit.hardware.out_of_memory import (
    asked_bytes,
    is_device_out_of_memory,
    is_host_out_of_memory,
    is_out_of_memory,
)
from autofit.probe.on_cpu import CpuProbe
from autofit.probe.on_cuda import CudaProbe, open_card, require_free_memory
from autofit.probe.steps import LossDivergedError, Probe, Request
from autofit.probe.timing import COMPOSED_MICRO_BATCHES
from autofit.techniques import register
from autofit.training.inspect import inspect_workload
from autofit.training.step import train_step
from autofit.training.step_trace import StepTrace

_IDLE = GIB  # a desktop takes less of a card, a process that computes takes more
_MOST_KEPT = 4000  # characters of a message


def serve(workload: bytes, call: bytes) -> Any:
    """Call the pickled function with the workload and its arguments, unpickled here, where user
    modules are imported.

    Errors of autofit's own kinds are returned, not raised.
    """

    def describe(error: BaseException) -> str:
        return f"the workload cannot be opened in a probe process: {describe_error(error)}."

    remedy = (
        "Define its functions in a module that can be imported, or in the notebook or script "
        "itself."
    )
    try:
        with as_input_error(describe, remedy):
            unpickled = pickle.loads(workload)
            function, arguments = pickle.loads(call)
        return function(unpickled, *arguments)
    except AutofitError as error:
        return error


def detect_hardware(_: Workload | None, device: str | None) -> Hardware:
    """The hardware alone."""
    return detect(device)


def list_cards(_: Workload | None) -> tuple[str, ...]:
    """The names of the visible cards, as CUDA_VISIBLE_DEVICES calls them."""
    return visible_cards()


def detect_idle_card(_: Workload | None, card: str) -> Hardware:
    """One visible card, which becomes the only one of this process.

    Raises ProbeError where others use it.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    used = used_bytes_without_context()
    if used > _IDLE:
        raise ProbeError(f"others use {used / GIB:.1f} GiB of card {card}.")
    return detect("cuda")


def inspect(
    workload: Workload, device: str | None, budget_bytes: int | None
) -> tuple[Hardware, Traits]:
    """The hardware, and the workload's traits on it."""
    hardware = detect(device)
    free = hardware.host_free_bytes
    if hardware.device != "cpu":
        free = hardware.memory_bytes - hardware.used_bytes
    return hardware, inspect_workload(workload, hardware, min(budget_bytes or free, free))


def check_free_memory(_: Workload | None, budget: Budget, hardware: Hardware) -> None:
    """Raise a ProbeError where other processes leave the card less than the budget."""
    require_free_memory(open_card(), budget, hardware)


@dataclass(frozen=True)
class RankAnswer:
    """What one of several ranks measured, and the error that ended it, if one did."""

    measurement: Measurement
    failure: Failure | None


def measure(workload: Workload, request: Request) -> Measurement:
    """Measure one Config; every way a run can end comes back as an Outcome, never as an exception.

    Of a Config for several devices the first rank is measured, without the others: its memory and
    its computation.

    Raises:
        ProbeError: the device cannot be used, or had less memory than the budget allows, so that
        nothing was measured.
    """
    own = dataclasses.replace(request, budget=request.budget.of_each(request.hardware.devices))
    found = _measured(workload, own, _alone(request.hardware), rank=0).measurement
    if request.hardware.world == 1:
        return found

    # Its loss is of weights that nobody has.
    return dataclasses.replace(found, loss=None, communication_seconds=0.0)


def _alone(hardware: Hardware) -> contextlib.AbstractContextManager[None]:
    """What a process runs in by itself: as the first rank, where the hardware has several."""
    if hardware.world == 1:
        return contextlib.nullcontext()
    return first_of(hardware.devices, hardware.nodes, hardware.device)


def measure_on_rank(
    workload: Workload, request: Request, place: Place, timeout: float
) -> RankAnswer:
    """`measure`, as one of several ranks, which waits for another for `timeout` seconds."""
    group = joined(place, request.hardware.device, timeout)
    return _measured(workload, request, group, rank=place.rank)


def link_of_rank(_: Workload | None, request: Request, place: Place, timeout: float) -> Link:
    """The link between this rank and the others."""
    device = request.hardware.device
    with joined(place, device, timeout):
        return measured_link(torch.device(device))


def _measured(
    workload: Workload,
    request: Request,
    group: contextlib.AbstractContextManager[None],
    *,
    rank: int,
) -> RankAnswer:
    start = time.monotonic()
    probe = _probe(workload, request)
    failure = None
    try:
        # The device is open: what communicators take of it counts as any growth of the context.
        with group:
            probe.run()
            outcome, reason = probe.verdict()
    except BaseException as error:  # nobody can press Ctrl-C here
        cause = _root_cause(error)
        failure = failure_of(rank, cause)
        outcome, reason = _classify(cause, request)
        if outcome is Outcome.OUT_OF_MEMORY:  # the error's frames still hold what they held
            probe.note_shortage(asked_bytes(cause))

    if outcome is Outcome.OUT_OF_MEMORY:
        probe.check_free_memory()
    if reason:
        reason = printable(reason, _MOST_KEPT)
    return RankAnswer(probe.measurement(outcome, reason, time.monotonic() - start), failure)


def trace_step(workload: Workload, request: Request, directory: Path) -> dict[str, str]:
    """Record the third step of a Config under the cap of its budget.

    A step of many micro-batches is cut to the first few and the update: a trace of all would be
    slow to open.

    Returns:
        The paths of the files by what they hold.
    """
    with _alone(request.hardware):
        return _traced(workload, request, directory)


def _traced(workload: Workload, request: Request, directory: Path) -> dict[str, str]:
    trace = StepTrace(directory, request.hardware.device)
    with trace.recording_allocations():
        probe = _probe(workload, request)
        setup = probe.prepare()
        trace.begin()
        train_step(setup, probe.part(setup, COMPOSED_MICRO_BATCHES))
        trace.end()

    return {name: str(path) for name, path in trace.files.items()}


def trace_on_rank(
    workload: Workload, request: Request, place: Place, timeout: float, *, directory: Path
) -> dict[str, str]:
    """`trace_step`, as one of several ranks, each into a directory of its own."""
    if place.rank:
        directory = directory / f"rank-{place.rank}"
    with joined(place, request.hardware.device, timeout):
        return _traced(workload, request, directory)


def trace_fetched(workload: Workload, request: Request) -> dict[str, tuple[str, bytes]]:
    """`trace_step` where no directory is shared: the files themselves, each with its path in the
    directory."""
    return _fetched(functools.partial(trace_step, workload, request))


def trace_fetched_on_rank(
    workload: Workload, request: Request, place: Place, timeout: float
) -> dict[str, tuple[str, bytes]]:
    """`trace_fetched`, as one of several ranks."""
    return _fetched(
        lambda directory: trace_on_rank(workload, request, place, timeout, directory=directory)
    )


def _fetched(trace: Callable[[Path], dict[str, str]]) -> dict[str, tuple[str, bytes]]:
    files = {}
    with tempfile.TemporaryDirectory() as name:
        for what, path in trace(Path(name)).items():
            inside = Path(path).relative_to(name)
            files[what] = str(inside), Path(path).read_bytes()
    return files


def _probe(workload: Workload, request: Request) -> Probe:
    """The probe of the requested device, which puts this process under the cap.

    Raises ProbeError where the device cannot be used.
    """
    for technique in request.techniques:
        register(technique)
    if request.hardware.device == "cuda":
        return CudaProbe(workload, request)
    return CpuProbe(workload, request)


def _root_cause(error: BaseException) -> BaseException:
    """The error that ended the device, if any.

    Every later call fails too, and clean-up code reports that instead.
    """
    cause = error
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:  # a chain made by hand may be a circle
        seen.add(id(link))
        if isinstance(link, torch.AcceleratorError) and not is_out_of_memory(link):
            cause = link
        link = link.__context__
    return cause


def _classify(error: BaseException, request: Request) -> tuple[Outcome, str]:
    if isinstance(error, RefusedError):
        return Outcome.REFUSED, str(error)
    if isinstance(error, LossDivergedError):
        return Outcome.DIVERGED, str(error)
    if isinstance(error, AutofitError):
        return Outcome.FAILED, str(error)
    if is_device_out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, f"needs more than {request.budget.device_bytes / GIB:.2f} GiB"
    if is_host_out_of_memory(error):
        if request.hardware.device == "cpu":
            return Outcome.OUT_OF_MEMORY, "ran into the resource limit that guards the machine"
        return Outcome.HOST_OUT_OF_MEMORY, "the host could not give more memory"

    if len(message_of(error)) <= _MOST_KEPT:
        parts = traceback.format_exception(error)
    else:  # formatting 25 million lines takes 8 seconds
        parts = [*traceback.format_tb(error.__traceback__), describe_error(error)]
    text = "".join(printable(part, _MOST_KEPT) for part in parts)
    sys.stderr.write(text)

    lines = text.strip().splitlines()
    # The first line of such an error says what it is; how to debug PyTorch follows.
    if isinstance(error, torch.AcceleratorError):
        del lines[len(lines) - len(str(error).strip().splitlines()) + 1 :]
    return Outcome.FAILED, "\n".join(lines[-12:])
