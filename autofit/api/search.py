"""`autofit.search`, and what it shares with `autofit.fit`: one search with its progress shown."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from autofit.api.tool_workload import for_tool
from autofit.core.errors import InputError, require
from autofit.core.events import Event, Listener, Note, ProbeFinished
from autofit.core.notebook import Cell, in_notebook
from autofit.core.options import SearchOptions, search_options
from autofit.core.place import given_place
from autofit.core.result import Result
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.export.tools import tool_named
from autofit.hardware.device import detect
from autofit.models import check_searched, resolve
from autofit.report.live import LiveDisplay
from autofit.training import random_state
from autofit.training.user_model import moved_to_host
from autofit.training.workload import with_known_rows, workload_from
from autofit.tuning.context import Judging
from autofit.tuning.pipeline import search_or_predict
from autofit.tuning.result_cache import outdated_note
from autofit.tuning.space import check_asked

_log = logging.getLogger("autofit")


def search(
    model: str | Workload | nn.Module,
    loader: Any = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    split: Callable[[Any, int], Any] | None = None,
    count: Callable[[Any], float] | None = None,
    frozen: Mapping[str, Any] | None = None,
    task: str | None = None,
    teacher: str | None = None,
    tool: str | None = None,
    seq_len: int | None = None,
    resolution: str | int | None = None,
    frames: int | None = None,
    train_text_encoders: bool = False,
    effective_batch: int | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
    judge: Judging | None = None,
    data: str | Path | None = None,
    weights: str | Path | None = None,
    loss_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Find the fastest config that fits, by measuring real training steps.

    Args:
        model: a preset's name (or directory, hub id, `file.py:function`), a Workload, or a living
            model with its `loader`, whose batch size is the effective batch. A living model is not
            touched.
        loss: (model, batch) -> scalar mean, or (sum, number of its terms), for a living model.
        split: (batch, size) -> a list of micro-batches, for a living model's batches of an unknown
            layout.
        count: batch -> number of the terms that the loss averages over, where gradients do not show
            it.
        judge: an autofit.Judge, which trains the finalists of a named model on data of yours and
            compares losses.
        data: a file of samples for a named language model: whether they are packed or padded is
            chosen by the tokens that count in a second, and is what `autofit train` does; default:
            the judge's.
        weights: a directory or a hub id, for the tokenizer of `data`.
        listener: called with every event of `autofit.core.events`.
        frozen: as in `fit`.
        task: what to train a named model for; default: what the class in its config.json says.
        teacher: the model that a named one learns from, with task "distill".
        seq_len, resolution, frames, train_text_encoders, effective_batch: of a named model, as on
            the command line.
        loss_options: of the loss of a named model's task, such as {"beta": 0.2}.
        tool: search only what this tool runs exactly as it is measured, such as "axolotl".
        options: gpu_mem, gpu, device, mem, host_mem (GiB), margin, space, set, trials, time_limit,
            tolerance, prefer, fast, seed, executor, workers, devices, out, resume, memory_snapshot,
            probe_timeout: as on the command line; store: False for --no-store.

    Returns:
        The result; its `best` is None when nothing fits. With gpu_mem or gpu but no CUDA device,
        `best` is None too, and `predicted_best` is the config predicted to be the fastest that
        fits.

    Raises:
        InputError: an argument is wrong; ProbeError: probes cannot run here.
    """
    require(listener is None or callable(listener), "listener must be a function", listener)
    require(judge is None or hasattr(judge, "check"), "judge must be an autofit.Judge", judge)
    checked = search_options(**options)
    if checked.executor == "local":  # ray symmetric-run, as a step of srun, runs one search
        check_alone("Start it once, with devices=.")
    of_loader = (loader, loss, split, count, frozen)
    encoders = None if train_text_encoders is False else train_text_encoders
    sizes = (seq_len, resolution, frames, encoders, effective_batch)
    of_names = (task, teacher, *sizes, loss_options)
    if isinstance(model, str | Workload) and any(given is not None for given in of_loader):
        message = "a loader, a loss, a split, a count and frozen models belong to a living model."
        remedy = "A Workload has its own batch and loss; a name's are made for it."
        raise InputError(message, remedy)

    living = None
    if isinstance(model, str):
        check_searched(task)
        workload = resolve(
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
        if data is None and judge is not None and TASKS[workload.task].continues_text:
            data, weights = judge.data, judge.weights
        if data is None and weights is not None:
            message = "weights are for the tokenizer of data, and no data are given."
            raise InputError(message, "Give both or neither.")
        if data is not None:
            # Loaded where it is needed: what reads files takes most of a second to import.
            with_data = import_module("autofit.api.packing").with_data
            workload = with_data(
                workload,
                data,
                weights,
                tolerance=checked.tolerance,
                trusted=trust_remote_code,
            )

        # The source of the result also names data and weights, which it can be trained with.
        source = dict(workload.source)
        if judge is not None:
            data, weights = judge.data, judge.weights
        if data is not None:
            source["data"] = str(data)
        if weights is not None:
            source["weights"] = str(weights)
        workload = dataclasses.replace(workload, source=source)
    elif tool is not None:
        message = "a tool trains a model given by name."
        raise InputError(message, "Leave tool out, or give a name.")
    elif data is not None or weights is not None:
        message = "data and weights are for a model given by name."
        raise InputError(message, "The loader or Workload has its own.")
    elif any(given is not None for given in of_names):
        message = (
            "task, teacher, seq_len, resolution, frames, train_text_encoders, effective_batch and "
            "loss_options belong to a model given by name."
        )
        raise InputError(message, "The loader or Workload says them.")
    elif isinstance(model, Workload):
        workload = model
    else:
        living = model
        workload = workload_from(model, loader, loss, split=split, count=count, frozen=frozen)
    if tool is not None:
        device = checked.device or ("cuda" if checked.names_a_card else detect().device)
        workload = for_tool(workload, tool_named(tool), device)
    workload = with_known_rows(workload)

    run = search_or_predict
    if judge is not None:
        judge.check(workload, checked)
        run = functools.partial(search_or_predict, judge=judge)
    return run_shown(run, workload, checked, listener, living)


def check_alone(remedy: str) -> None:
    """Raise an InputError where this process is one of several, which would all search."""
    if given_place() is not None:
        raise InputError(
            "a search starts processes of its own, and this one was started as one of several.",
            remedy,
        )


def run_shown(
    run: Callable[[Workload, SearchOptions, Listener], Result],
    workload: Workload,
    options: SearchOptions,
    listener: Listener | None,
    model: nn.Module | None,
) -> Result:
    """Run a search while a living model waits in host memory, and random numbers stay as they are.

    A notebook shows the progress unless the user's own listener does.
    """
    check_asked(options)
    listeners = [listener] if listener else []
    with ExitStack() as stack:
        is_own = getattr(listener, "__wrapped__", listener) not in (None, log_event)
        if in_notebook() and not is_own:
            listeners.append(stack.enter_context(LiveDisplay(Cell())))
        stack.enter_context(random_state.preserved())
        if model is not None:
            stack.enter_context(moved_to_host(model))

        def notify(event: Event) -> None:
            for listen in listeners:
                listen(event)

        note = outdated_note()
        if note:
            notify(Note(note))
        return run(workload, options, notify)


def log_event(event: Event) -> None:
    """Log to `autofit`: notes as warnings, which show by default, and probes as info."""
    if isinstance(event, Note):
        _log.warning(event.text)
    elif isinstance(event, ProbeFinished):
        measurement = event.measurement
        _log.info("probe %d: %s", measurement.number + 1, measurement.outcome.value)
