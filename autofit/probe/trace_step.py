"""One step of a Config written down in a child process, under the cap of its budget, where nothing is timed."""

from __future__ import annotations

from pathlib import Path

from autofit.core.workload import Workload
from autofit.probe.measure import probe_of
from autofit.probe.steps import COMPOSED_MICRO_BATCHES, Request
from autofit.techniques import register
from autofit.training.step import train_step
from autofit.training.step_trace import StepTrace


def trace_step(workload: Workload, request: Request, directory: Path) -> dict[str, str]:
    """Write down the third step of a Config; the paths of what was written, by what it is.

    Of a step of many micro-batches the first few stand for all, the update included: a trace of 32 would be slow to
    open and say nothing more.
    """
    for technique in request.techniques:
        register(technique)
    trace = StepTrace(directory, request.hardware.device)
    with trace.recording_allocations():
        probe = probe_of(workload, request)
        setup = probe.prepare()
        trace.begin()
        train_step(setup, probe.part(setup, COMPOSED_MICRO_BATCHES))
        trace.end()
    return {name: str(path) for name, path in trace.files.items()}
