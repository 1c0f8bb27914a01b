"""`autofit.search`, and what it shares with `autofit.fit`: one search with its progress shown."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from autofit.api.packing import TASK, with_data
from autofit.core.errors import InputError, require
from autofit.core.events import Event, Listener, Note, ProbeFinished
from autofit.core.notebook import Cell, in_notebook
from autofit.core.options import SearchOptions, search_options
from autofit.core.place import given_place
from autofit.core.result import Result
from autofit.core.workload import Workload
from autofit.models import resolve
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
    task: str | None = None,
    seq_len: int | None = None,
    effective_batch: int | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
    judge: Judging | None = None,
    data: str | Path | None = None,
    weights: str | Path | None = None,
    **options: Any,
) -> Result:
    """Find the fastest config that fits, by measuring real training steps.

    Args:
        model: a preset's name (or directory, hub id, `file.py:function`), a Workload, or a living model with its
            `loader`, whose batch size is the effective batch. A living model is not touched.
        loss: (model, batch) -> scalar mean, or (sum, number of its terms), for a living model.
        split: (batch, size) -> a list of micro-batches, for a living model's batches of an unknown layout.
        count: batch -> number of the terms that the loss averages over, where gradients do not show it.
        judge: an autofit.Judge, which trains the finalists of a named model on data of yours and compares losses.
        data: a file of samples for a named language model: whether they are packed or padded is chosen by the tokens
            that count in a second, and is what `autofit train` does; default: the judge's.
        weights: a directory or a hub id, for the tokenizer of `data`.
        listener: called with every event of `autofit.core.events`.
        task: what to train a named model for; default: what the class in its config.json says.
        options: gpu_mem, gpu, device, mem, host_mem (GiB), margin, space, set, trials, time_limit, tolerance, fast,
            seed, executor, workers, devices, out, resume, memory_snapshot, probe_timeout: as on the command line;
            store: False for --no-store.

    Returns:
        The result; its `best` is None when nothing fits. With gpu_mem or gpu but no CUDA device, `best` is None too,
        and `predicted_best` is the config predicted to be the fastest that fits.

    Raises:
        InputError: an argument is wrong; ProbeError: probes cannot run here.
    """
    require(listener is None or callable(listener), "listener must be a function", listener)
    require(judge is None or hasattr(judge, "check"), "judge must be an autofit.Judge", judge)
    checked = search_options(**options)
    if checked.executor == "local":  # ray symmetric-run, as a step of srun, runs one search
        check_alone("Start it once, with devices=.")
    living = model if isinstance(model, nn.Module) else None
    if isinstance(model, str | Workload) and any(each is not None for each in (loader, loss, split, count)):
        message = "a loader, a loss, a split and a count belong to a living model."
        raise InputError(message, "A Workload has its own batch and loss; a name's are made for it.")
    if isinstance(model, str):
        sizes = {"sequence_length": seq_len, "effective_batch_size": effective_batch}
        workload = resolve(model, task=task, trust_remote_code=trust_remote_code, **sizes)
        if data is None and judge is not None and workload.task == TASK:
            data, weights = judge.data, judge.weights
        if data is None and weights is not None:
            raise InputError("weights are for the tokenizer of data, and no data are given.", "Give both or neither.")
        if data is not None:
            workload = with_data(workload, data, weights, tolerance=checked.tolerance, trusted=trust_remote_code)
        workload = _naming(workload, *((judge.data, judge.weights) if judge is not None else (data, weights)))
    elif data is not None or weights is not None:
        raise InputError("data and weights are for a model given by name.", "The loader or Workload has its own.")
    elif (task, seq_len, effective_batch) != (None, None, None):
        message = "task, seq_len and effective_batch belong to a model given by name."
        raise InputError(message, "The loader or Workload says them.")
    else:
        workload = (
            model if isinstance(model, Workload) else workload_from(model, loader, loss, split=split, count=count)
        )
    workload = with_known_rows(workload)
    run = search_or_predict
    if judge is not None:
        judge.check(workload, checked)
        run = functools.partial(search_or_predict, judge=judge)
    return run_shown(run, workload, checked, listener, living)


def _naming(workload: Workload, data: str | Path | None, weights: str | Path | None) -> Workload:
    """The workload whose source also names the user's own data and weights, which it can be trained with."""
    named = {"data": data, "weights": weights}
    given = {name: str(each) for name, each in named.items() if each is not None}
    return dataclasses.replace(workload, source={**workload.source, **given})


def check_alone(remedy: str) -> None:
    """Raise an InputError where torchrun or srun started this process as one of several, which would all search."""
    if given_place() is not None:
        message = "a search starts processes of its own, and this one was started as one of several."
        raise InputError(message, remedy)


def run_shown(
    run: Callable[[Workload, SearchOptions, Listener], Result],
    workload: Workload,
    options: SearchOptions,
    listener: Listener | None,
    model: nn.Module | None,
) -> Result:
    """Run a search while a living model leaves the card; a notebook shows the progress unless a listener does. Random
    numbers of this process stay where they are."""
    check_asked(options)
    listeners = [listener] if listener else []
    with ExitStack() as stack:
        if in_notebook() and getattr(listener, "__wrapped__", listener) in (None, log_event):
            listeners.append(stack.enter_context(LiveDisplay(Cell())))
        stack.enter_context(random_state.preserved())
        if model is not None:
            stack.enter_context(moved_to_host(model))

        def notify(event: Event) -> None:
            for listen in listeners:
                listen(event)

        if note := outdated_note():
            notify(Note(note))
        return run(workload, options, notify)


def log_event(event: Event) -> None:
    """Log to `autofit`: notes as warnings, which show by default, and probes as info."""
    if isinstance(event, Note):
        _log.warning(event.text)
    elif isinstance(event, ProbeFinished):
        _log.info("probe %d: %s", event.measurement.number + 1, event.measurement.outcome.value)
