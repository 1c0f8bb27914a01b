"""The Python faces: `search` for the answer, `fit` for the trained model."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.api.predicted_search import search_or_predict
from autofit.core.errors import InputError, unknown
from autofit.core.events import Event, Note, ProbeFinished
from autofit.core.files import write_atomically
from autofit.core.notebook import Cell, in_notebook
from autofit.core.options import SearchOptions, search_options
from autofit.core.result import Result, SavedResult
from autofit.core.workload import Hyperparameters, Workload
from autofit.models import resolve
from autofit.report import LiveDisplay, explain, nothing_fits
from autofit.report.html import trained_html
from autofit.training import checkpoint
from autofit.training.loop import Callback, StepReport
from autofit.training.metrics import Bar
from autofit.training.save_model import merged
from autofit.training.session import BATCH_SPLIT_FILE, CheckpointPolicy, Session
from autofit.training.user_model import dtypes_to_restore, moved_to_host
from autofit.training.workload import Peek, batches_of, empty_pass, length_of, training_workload, workload_from
from autofit.tuning import result_cache
from autofit.tuning.run import Listener, run_search

__all__ = ["Trained", "explain", "fit", "nothing_fits", "search"]

_SEARCH, _RESULT = "search", "result.yaml"  # the run directory inside an output directory, and what came of it
_TRACES = (_SEARCH, _RESULT, BATCH_SPLIT_FILE)  # of a run that was stopped before its first checkpoint
_SEARCHES = ("auto", "always")
_SPACE, _LR = "full", Hyperparameters.lr
_log = logging.getLogger("autofit")


@dataclass(frozen=True)
class Trained:
    """What `fit` hands back: the user's own model, trained; a report of each step; the result of the search.

    `result` is a SavedResult where it was found stored, and None where the config was given. `evaluations` are the mean
    losses on eval_loader, one after each pass over the loader and one at the end.
    """

    model: nn.Module
    history: list[StepReport]
    result: Result | SavedResult | None
    evaluations: list[float]

    def _repr_html_(self) -> str:
        return trained_html(self.history, self.evaluations, _config_of(self.result))

    def merged(self) -> nn.Module:
        """A copy of the model with its adapters folded into the weights: plain layers again. Takes its memory again."""
        return merged(self.model)


def search(
    model: str | Workload | nn.Module,
    loader: Any = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    seq_len: int | None = None,
    effective_batch: int | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
    **options: Any,
) -> Result:
    """Find the fastest config that fits, by measuring real training steps.

    Args:
        model: a preset's name (or directory, hub id, `file.py:function`), a Workload, or a living model with its
            `loader`, whose batch size is the effective batch. A living model is not touched.
        loss: (model, batch) -> scalar mean, for a living model.
        listener: called with every event of `autofit.core.events`.
        options: gpu_mem, gpu, device, mem, host_mem (GiB), margin, space, set, trials, time_limit, tolerance, seed,
            workers, out, resume, memory_snapshot, probe_timeout: as on the command line; store: False for --no-store.

    Returns:
        The result; its `best` is None when nothing fits. Where gpu_mem or gpu was given and there is no CUDA device, it
        is None too, and `predicted_best` is what is predicted to be the fastest that fits.

    Raises:
        InputError: something given is wrong; ProbeError: probes cannot run here.
    """
    checked = search_options(**options)
    if isinstance(model, str):
        _only_for_living_models(loader, loss)
        workload = resolve(
            model, sequence_length=seq_len, effective_batch_size=effective_batch, trust_remote_code=trust_remote_code
        )
    elif seq_len is not None or effective_batch is not None:
        raise InputError(
            "seq_len and effective_batch belong to a model given by name.", "The loader or Workload says them."
        )
    elif isinstance(model, Workload):
        _only_for_living_models(loader, loss)
        workload = model
    else:
        workload = workload_from(model, loader, loss)
    living = model if isinstance(model, nn.Module) else None
    return _run_search(workload, checked, listener, living, run=search_or_predict)


@torch.inference_mode(mode=False)  # a notebook may have switched gradients off for everything
@torch.enable_grad()
def fit(
    model: nn.Module,
    loader: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    lr: float = _LR,
    weight_decay: float = 0.0,
    schedule: str = "constant",
    warmup_steps: int = 0,
    max_grad_norm: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    config: Mapping[str, Any] | None = None,
    eval_loader: Any = None,
    callbacks: Sequence[Callback] = (),
    output_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 200,
    keep_last: int = 2,
    seed: int = 0,
    space: str | None = None,
    search: str = "auto",
    worst_case: Any = None,
    peek: int = 64,
    progress: bool | None = None,
    listener: Listener | None = None,
    restart: Callable[[], NoReturn] | None = None,
    **options: Any,
) -> Trained:
    """Search for the fastest config that fits, then train the user's own model with it.

    The loader's batch size is the effective batch: each of its batches is one optimizer step, cut into micro-batches
    as the config says. The model is trained in place. Modules come back in train or eval mode as they came, weights on
    the device that they were trained on, and in the format they came in, unless `config`, `space` or `set` asks for
    another.

    Args:
        loss: (model, batch) -> scalar mean; default: the model's own.
        lr: the learning rate, the most that the schedule gives; that the default is taken is told.
        epochs, steps: how long, one of them; default: one pass over the loader.
        optimizer: a value of the knob of that name, or a function from parameter groups to an optimizer of one's own,
            whose learning rate the loop sets; default: the search chooses.
        config: train with this one, without a search.
        eval_loader: evaluated after each pass over the loader and at the end.
        callbacks: functions of a StepReport, called after every optimizer step.
        output_dir: keeps the run directory (`search/`) and its `result.yaml`, a checkpoint every `checkpoint_every`
            steps (the `keep_last` newest), `metrics.jsonl`, and the trained `model/`. `resume` goes on from there.
        space: the space to search; default: `full`, as far as weights keep the format (dtype) they came in, unless
            `set` says otherwise.
        search: "auto" takes the stored result of a search for the same model, data shape, hardware, options and
            versions, where there is one; "always" searches again.
        worst_case: a batch of the largest samples there are; default: the largest of the loader's first `peek` batches.
        progress: show a bar; default: on a terminal and in a notebook.
        listener: called with every event; default: the logger `autofit`.
        restart: called where memory ran out in the middle of an update, to resume in a fresh process (`autofit train`
            starts itself again); default: the last checkpoint is read back in this one.
        options: those of `search`: gpu_mem, gpu, device, mem, set, trials, time_limit, ...

    Raises:
        InputError: something given is wrong, or the loss is no longer finite; NothingFitsError: no config fits;
        ProbeError: probes cannot run here; OutOfMemoryError: memory ran out, and nothing could be done about it.
    """
    _check_fit(config, callbacks, search)
    tell = listener or log_event
    if lr is _LR:  # nobody gave one: a number that is written somewhere is an object of its own
        tell(Note(f"lr is not given: the learning rate is {_LR:g}."))
    config, options = _with_optimizer(optimizer, config, options)
    directory = _directory(output_dir, resume)
    own = optimizer if callable(optimizer) else None
    workload = (workload_from if config is None else training_workload)(
        model, loader, loss, optimizer=own, peek=Peek(worst_case, peek)
    )
    if config is None and space is None:
        workload = dataclasses.replace(workload, keeps=dtypes_to_restore(model, options.get("set", {})))
    session = Session(
        workload=workload,
        model=model,
        hyperparameters=Hyperparameters(lr, weight_decay, schedule, warmup_steps, max_grad_norm, seed),
        policy=CheckpointPolicy(directory, resume, checkpoint_every, keep_last),
        callbacks=tuple(callbacks),
        listener=lambda text: tell(Note(text)),
        progress=Bar.wanted() if progress is None else progress,
        restart=restart,
    )
    total = _total_steps(loader, epochs, steps)
    result = None
    if config is None:
        if max_grad_norm is not None:  # which needs all gradients at once
            options["set"] = {"optimizer_in_backward": False, **options.get("set", {})}
        result = _found(session, search_options(space=space or _SPACE, **{"seed": seed, **options}), search, tell)
        config = _config_of(result)
        assert config is not None, "else NothingFitsError"
    device = _device(result, options)
    history, evaluations = session.run(config, device, loader, steps=total, eval_loader=eval_loader)
    return Trained(model, history, result, evaluations)


def _check_fit(config: Any, callbacks: Any, search: str) -> None:
    if config is not None and not isinstance(config, Mapping):
        given = type(config).__name__
        raise InputError(f"config must be an autofit.Config or a mapping of knobs, not a {given}.", "Or leave it out.")
    if callable(callbacks):
        raise InputError("callbacks must be a tuple of functions, not one function.", "Write callbacks=(function,).")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise InputError(f"callbacks must be a tuple of functions, not {callbacks!r}.", "Write callbacks=(function,).")
    if search not in _SEARCHES:
        raise unknown("value for search", search, _SEARCHES)


def _with_optimizer(
    optimizer: Any, config: Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """The config, or the options of the search, with the optimizer fixed that was named."""
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, Optimizer)):
        return config, options
    if not isinstance(optimizer, str):
        message = f"optimizer must be the name of one or a function that makes one, not a {type(optimizer).__name__}."
        raise InputError(message, "For example optimizer=lambda groups: torch.optim.NAdam(groups).")
    named = {"optimizer": optimizer}
    if config is not None:
        return {**config, **named}, options
    return None, {**options, "set": {**options.get("set", {}), **named}}


def _found(session: Session, options: SearchOptions, search: str, tell: Listener) -> Result | SavedResult:
    """The result of a search: of the run that is resumed, a stored one, or a new one. Kept beside the checkpoints."""
    directory = session.policy.directory
    kept = directory / _RESULT if directory else None
    if session.policy.resume and kept and kept.exists():
        return SavedResult.load(kept)
    key = result_cache.key_of(session.workload, options)
    path = result_cache.find(key) if search == "auto" else None
    result: Result | SavedResult
    if path is not None:
        result, text = SavedResult.load(path), path.read_text(encoding="utf-8")
        tell(Note(f'{result_cache.describe(result)}; search="always" searches again.'))
    else:
        result = _searched(session, options, tell)
        text = result.to_yaml()
        result_cache.keep(key, text)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, text)
    return result


def _searched(session: Session, options: SearchOptions, tell: Listener) -> Result:
    directory = session.policy.directory
    if directory and options.out is None:
        out = directory / _SEARCH
        options = options.model_copy(update={"out": out, "resume": (out / "journal.log").exists()})
    result = _run_search(session.workload, options, tell, session.model, run=run_search)
    if result.best is None:
        raise nothing_fits(result)
    return result


def _run_search(
    workload: Workload,
    options: SearchOptions,
    listener: Listener | None,
    model: nn.Module | None,
    *,
    run: Callable[[Workload, SearchOptions, Listener], Result],
) -> Result:
    """A search, before which a living model leaves the card, and of which a notebook shows the progress."""
    listeners = [listener] if listener else []
    with ExitStack() as stack:
        if in_notebook() and listener in (None, log_event):  # else somebody shows it in a way of their own
            listeners.append(stack.enter_context(LiveDisplay(Cell())))
        if model is not None:
            stack.enter_context(moved_to_host(model))

        def tell(event: Event) -> None:
            for each in listeners:
                each(event)

        return run(workload, options, tell)


def _config_of(result: Result | SavedResult | None) -> Mapping[str, Any] | None:
    if isinstance(result, SavedResult):
        return result.config
    return result.best.config if result and result.best else None


def _device(result: Result | SavedResult | None, options: dict[str, Any]) -> str | None:
    if isinstance(result, SavedResult):
        return str(result.hardware["device"])
    return result.hardware.device if result else search_options(**options).wanted_device


def log_event(event: Event) -> None:
    """Tell the logger `autofit`: what a user should know as a warning, which shows by default; probes as info."""
    if isinstance(event, Note):
        _log.warning(event.text)
    elif isinstance(event, ProbeFinished):
        _log.info("probe %d: %s", event.measurement.number + 1, event.measurement.outcome.value)


def _only_for_living_models(loader: Any, loss: Any) -> None:
    if loader is not None or loss is not None:
        message = "a loader and a loss belong to a living model."
        raise InputError(message, "A Workload has its own batch and loss; a name's are made for it.")


def _directory(output_dir: str | Path | None, resume: bool) -> Path | None:
    if output_dir is None:
        if resume:
            raise InputError("to resume, the directory must be named.", "Give output_dir.")
        return None
    directory = Path(output_dir).expanduser().absolute()  # also where a callback changes the working directory
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file, not a directory.", "Choose another output directory.")
    if not resume and checkpoint.exists(directory):
        raise InputError(f"{directory} already holds a training run.", "Resume it, or choose another output directory.")
    if resume and not checkpoint.exists(directory) and not any((directory / name).exists() for name in _TRACES):
        raise InputError(f"there is no run to resume in {directory}.", "Leave out resume, or check the directory.")
    _check_writable(directory)
    return directory


def _check_writable(directory: Path) -> None:
    """A place that cannot be written to should not come to light after a search."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        message = f"{directory} cannot be written to: {error.strerror}."
        raise InputError(message, "Choose an output directory that can be written to.") from error


def _total_steps(loader: Any, epochs: int | None, steps: int | None) -> int:
    """Optimizer steps in all: one for each batch of the loader.

    Raises:
        InputError: both given, not positive, or a loader that is found empty when its batches are counted.
    """
    if epochs is not None and steps is not None:
        raise InputError("epochs and steps both say how long to train.", "Give one of them.")
    given = steps if steps is not None else epochs if epochs is not None else 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InputError(f"the length of training must be a positive whole number, not {given!r}.")
    if steps is not None:
        return steps
    length = length_of(loader)
    if length is None and not (length := sum(1 for _ in batches_of(loader))):
        raise empty_pass()
    return given * length
