"""`autofit.fit`: a search, then the training of the user's own model with what it found."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.api.search import check_alone, log_event, run_shown
from autofit.core.errors import InputError, counted, require, several, unknown
from autofit.core.events import Event, Listener, Note
from autofit.core.files import check_output, expanded, locked, write_atomically
from autofit.core.layout import Layout, dividing, fitted_to
from autofit.core.options import SearchOptions, check_devices, search_options
from autofit.core.place import given_place, is_started_again, note_run
from autofit.core.record import RECORD, Record
from autofit.core.result import Result, SavedResult
from autofit.core.run_directory import JOURNAL
from autofit.core.workload import Hyperparameters, length_of_training
from autofit.distributed.group import joined
from autofit.report.explain import nothing_fits
from autofit.report.html import trained_html
from autofit.training import checkpoint
from autofit.training.loop import Callback, StepReport
from autofit.training.metrics import Bar
from autofit.training.on_devices import run_on_devices
from autofit.training.save_model import merged
from autofit.training.session import CheckpointPolicy, Session
from autofit.training.user_model import dtypes_to_restore
from autofit.training.workload import (
    Peek,
    batches_of,
    empty_pass,
    length_of,
    put_back,
    training_workload,
    workload_from,
)
from autofit.tuning import result_cache
from autofit.tuning.changed_world import fitted_here, is_of_another_world
from autofit.tuning.pipeline import run_search

_SEARCH, _RESULT = "search", "result.yaml"  # in an output directory: the run directory, and the result of the search
_DEFAULT_LR = Hyperparameters.lr


@dataclass(frozen=True)
class Trained:
    """What `fit` returns: the user's own model, trained; a report of each step; the result of the search, measured now
    or before. `result` is None where the config was given, and a SavedResult where a resumed run's `search/` is gone.
    `evaluations` are the mean losses on eval_loader, one after each pass over the loader and one at the end."""

    model: nn.Module
    history: list[StepReport] = field(repr=False)
    result: Result | SavedResult | None = field(repr=False)
    evaluations: list[float]

    def _repr_html_(self) -> str:
        losses, config = [step.loss for step in self.history], self.result.config if self.result else None
        samples, seconds = sum(step.samples for step in self.history), sum(step.seconds for step in self.history)
        return trained_html(losses, self.evaluations, config or {}, samples=samples, seconds=seconds)

    def merged(self) -> nn.Module:
        """A copy of the model with its adapters folded into the weights: plain layers again. Takes its memory again."""
        return merged(self.model)


@torch.inference_mode(mode=False)  # a notebook may have switched gradients off for everything
@torch.enable_grad()
def fit(
    model: nn.Module,
    loader: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    split: Callable[[Any, int], Any] | None = None,
    count: Callable[[Any], float] | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    lr: float = _DEFAULT_LR,
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
    devices: int | None = None,
    nodes: int = 1,
    **options: Any,
) -> Trained:
    """Search for the fastest config that fits, then train the user's own model with it.

    The loader's batch size is the effective batch: each batch is one optimizer step, split into micro-batches as the
    config says. The model is trained in place. In a model in train mode, modules in eval mode are trained so (frozen
    BatchNorm); one in eval mode, as `from_pretrained` returns it, is trained in train mode altogether. Without a cache
    of keys and values, and without checkpointing but the config's. All that is given back afterwards, and the weights
    come back on the device they were trained on, in the format they came in unless `config`, `space` or `set` asks for
    another.

    Args:
        loss: (model, batch) -> scalar mean, or (sum, number of its terms); default: the model's own. What it averages
            over is found by gradients of a few samples; one that is no such mean is not split into micro-batches.
        split: (batch, size) -> a list of micro-batches, for batches whose samples are not along dim 0.
        count: batch -> number of the terms that the loss averages over, where that is not found by itself.
        lr: the learning rate, the maximum of the schedule; a note says when the default is used.
        epochs, steps: how long, one of them; default: one pass over the loader.
        optimizer: a value of the knob of that name, or a function from parameter groups to an optimizer of one's own,
            whose learning rate the loop sets; default: the search chooses.
        config: train with this one, without a search.
        eval_loader: evaluated after each pass over the loader and at the end.
        callbacks: functions of a StepReport, called after every optimizer step.
        output_dir: receives the run directory (`search/`) and its `result.yaml`, a checkpoint every `checkpoint_every`
            steps (the `keep_last` newest stay), `metrics.jsonl`, and the trained `model/`. `resume` continues there.
        space: the space to search; default: `full`, as far as weights keep the format (dtype) they came in, unless
            `set` says otherwise.
        search: "auto" uses the cached result of a search for the same model, data shape, hardware, options and
            versions, where there is one; "always" searches again.
        worst_case: a batch of the largest samples there are; default: the largest of the loader's first `peek` batches.
        progress: show a bar; default: on a terminal and in a notebook.
        listener: called with every event; default: the logger `autofit`.
        restart: called when memory ran out in the middle of an update, to resume in a fresh process (`autofit train`
            starts itself again); default: this process goes back to the last checkpoint.
        devices: how many of this machine train together, each in a process of its own; default: as many as the config
            is for, else one. A search measures on as many. Under torchrun or srun each process takes its place among
            those that were started, with a config.
        nodes: how many machines; more than one are started by torchrun or srun.
        options: those of `search`: gpu_mem, gpu, device, mem, set, trials, time_limit, ...

    Raises:
        InputError: an argument is wrong, or the loss is no longer finite; NothingFitsError: no config fits;
        ProbeError: probes cannot run here; OutOfMemoryError: memory ran out, and no fallback is left.
    """
    rule = "config must be an autofit.Config or a mapping of knobs"
    require(config is None or isinstance(config, Mapping), rule, config, "Or leave it out.")
    fine = isinstance(callbacks, Sequence) and all(map(callable, callbacks))
    require(fine, "callbacks must be a tuple of functions", callbacks, "Write callbacks=(function,).")
    if search not in ("auto", "always"):
        raise unknown("value for search", search, ("auto", "always"))
    for name, function in ("listener", listener), ("restart", restart):
        require(function is None or callable(function), f"{name} must be a function", function)
    require(isinstance(resume, bool), "resume must be True or False", resume)
    require(progress is None or isinstance(progress, bool), "progress must be True or False", progress)
    fine = eval_loader is None or callable(eval_loader) or isinstance(eval_loader, Iterable)
    require(fine, "eval_loader must be an iterable of batches", eval_loader, "Leave it out for none.")
    search_options(space=space, **{"seed": seed, **options})  # before anything is made of them
    place = given_place()
    resume = resume or (output_dir is not None and is_started_again(expanded(output_dir, "output_dir")))
    check_devices(devices, nodes)
    if nodes > 1 and place is None:
        message = f"{nodes} nodes are to train together, and this process was started alone"
        raise InputError(f"{message}.", f"Start it on each: torchrun --nnodes {nodes} --nproc-per-node ... SCRIPT.")
    listener = _said_once(listener or log_event) if place is None or not place.rank else _silent
    if lr is _DEFAULT_LR:  # nobody gave one: a number that is written somewhere is an object of its own
        listener(Note(f"lr is not given: the learning rate is {_DEFAULT_LR:g}."))
    config, options = _with_optimizer(optimizer, config, options)
    if config is None:
        check_alone("Give config=, or start it once, with devices=.")
    world = place.world if place else devices or Layout.of(config or {}).world
    with contextlib.ExitStack() as stack:
        if place is None or not place.rank:
            directory = stack.enter_context(_output_directory(output_dir, resume, listener))
        else:
            directory = output_dir if output_dir is None else expanded(output_dir, "output_dir").absolute()
        own_optimizer = optimizer if callable(optimizer) else None
        make_workload = workload_from if config is None else training_workload
        peeked = Peek(worst_case, peek)
        workload = make_workload(model, loader, loss, optimizer=own_optimizer, split=split, count=count, peek=peeked)
        if config is None and space is None:
            workload = dataclasses.replace(workload, keeps=dtypes_to_restore(model, options.get("set", {})))
        hyperparameters = Hyperparameters(lr, weight_decay, schedule, warmup_steps, max_grad_norm, seed)
        policy = CheckpointPolicy(directory, resume, checkpoint_every, keep_last)
        bar = Bar.wanted() if progress is None else progress
        given = (workload, model, hyperparameters, policy, tuple(callbacks), lambda text: listener(Note(text)), bar)
        # A process that may be started again ends after training, so that no device needs to hold the whole model.
        session = Session(*given, restart, taken=_silent if restart and place else None)
        total_steps = _total_steps(loader, epochs, steps)
        result, run = None, session.run
        effective = workload.effective_batch_size
        if place is None and (fewer := dividing(config or {}, world, effective)[0]) < world:
            samples = counted(effective, "sample")
            listener(Note(f"{samples} do not divide among {world} devices: {fewer} of them train."))
            world = fewer
        if config is None:
            if max_grad_norm is not None:  # which needs all gradients at once
                options["set"] = {"optimizer_in_backward": False, **options.get("set", {})}
            checked = search_options(space=space or "full", devices=world, **{"seed": seed, **options})
            if checked.wanted_device != "cpu" and 0 < (cards := torch.cuda.device_count()) < world:
                message = f"{world} devices are to train, and this machine has {counted(cards, 'card')}."
                raise InputError(message, "Give fewer devices. For a config that trains elsewhere: autofit.search.")
            result = _result(session, checked, listener, reuse=search == "auto")
            config = result.config
            assert config is not None, "else NothingFitsError"
            hardware = result.hardware
            device = hardware["device"] if isinstance(hardware, Mapping) else hardware.device
        else:
            checked = search_options(**options)
            device = checked.wanted_device
        if place is None and is_of_another_world(config, world):
            world, config = fitted_here(config, world, workload, model, options=checked, listener=listener)
        config = fitted_to(config, world, effective)
        if world > 1:
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            run = functools.partial(run_on_devices, session, devices=world) if place is None else session.run
            if place is not None and not torch.distributed.is_initialized():
                stack.enter_context(joined(place, device))
        passes = None if steps is not None else length_of_training(epochs, steps)
        history, evaluations = run(config, device, loader, steps=total_steps, epochs=passes, eval_loader=eval_loader)
        return Trained(model, history, result, evaluations)


def _said_once(listener: Listener) -> Listener:
    """The listener without notes that it got before: a search and the training after it find out the same."""
    said: set[str] = set()

    @functools.wraps(listener)
    def listen(event: Event) -> None:
        if isinstance(event, Note):
            if event.text in said:
                return
            said.add(event.text)
        listener(event)

    return listen


def _silent(_: Any) -> None:
    """What ranks after the first do with events, which are the same on all, and any with a model that nobody wants."""


def _with_optimizer(
    optimizer: Any, config: Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """The config, or the options of the search, with a named optimizer fixed."""
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, Optimizer)):
        return config, options
    if isinstance(optimizer, list | tuple | dict) and len(optimizer) > 1:
        raise several(f"optimizer is a {type(optimizer).__name__} of {len(optimizer)}")
    if not isinstance(optimizer, str):
        message = f"optimizer must be the name of one or a function that makes one, not a {type(optimizer).__name__}."
        raise InputError(message, "For example optimizer=lambda groups: torch.optim.NAdam(groups).")
    named = {"optimizer": optimizer}
    if config is not None:
        return {**config, **named}, options
    return None, {**options, "set": {**options.get("set", {}), **named}}


def _result(session: Session, options: SearchOptions, listener: Listener, *, reuse: bool) -> Result | SavedResult:
    """The result of the run that is resumed, a cached one, or that of a new search; saved beside the checkpoints."""
    directory = session.policy.directory
    saved = directory / _RESULT if directory else None
    out = options.out or (directory / _SEARCH if directory else None)
    if session.policy.resume and saved and saved.exists():
        return _resumed_result(saved, out)

    key = result_cache.key_of(session.workload, options)
    cached = result_cache.find(key) if reuse else None
    if cached is not None:
        for note in (f'{cached.describe()}; search="always" searches again.', *session.workload.notes):
            listener(Note(note))
        result = cached.result()
        if out is not None:
            result = cached.write(out, session.workload, lambda text: listener(Note(text)))
    else:
        if out is not None and options.out is None:
            options = options.model_copy(update={"out": out, "resume": (out / JOURNAL).exists()})
        result = run_shown(run_search, session.workload, options, listener, session.model)
        if result.best is None:
            raise nothing_fits(result)
        result_cache.save(key, result)
    if saved:
        saved.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(saved, result.to_yaml())
    return result


def _resumed_result(path: Path, out: Path | None) -> Result | SavedResult:
    """The result that a run began with: whole where its run directory still holds it, else what the file says."""
    saved = SavedResult.load(path)
    if out is None:
        return saved
    try:
        record = Record.load(out / RECORD)
    except InputError:
        return saved
    is_same = record.intact and record.result.config == saved.config  # a hand may have changed the file
    return record.result if is_same else saved


@contextlib.contextmanager
def _output_directory(output_dir: str | Path | None, resume: bool, listener: Listener) -> Iterator[Path | None]:
    """The directory, writable and no other training's, with a run exactly when one is resumed: known before a search. A
    run that was killed before its first checkpoint begins anew."""
    directory = output_dir if output_dir is None else expanded(output_dir, "output_dir").absolute()
    check_output(directory, resume)
    if directory is None:
        yield None
        return
    if not resume and checkpoint.exists(directory):
        raise InputError(f"{directory} already holds a training run.", "Resume it, or choose another output directory.")
    with contextlib.ExitStack() as held:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(directory / ".lock"))
            with tempfile.TemporaryFile(dir=directory):
                pass
        except BlockingIOError as error:
            message = f"{directory} is in use by another training."
            raise InputError(message, "Wait for it to end, or choose another output directory.") from error
        except OSError as error:
            message = f"{directory} cannot be written to: {error.strerror}."
            raise InputError(message, "Choose an output directory that can be written to.") from error
        note_run(directory)
        if resume and not checkpoint.exists(directory):
            listener(Note(f"there is no checkpoint in {directory} yet: the training begins anew."))
        yield directory


def _total_steps(loader: Any, epochs: int | None, steps: int | None) -> int:
    """Optimizer steps in all: one for each batch of the loader."""
    given = length_of_training(epochs, steps)
    if steps is not None:
        return steps
    length = length_of(loader)
    if length is None:
        with put_back(loader):
            length = sum(1 for _ in batches_of(loader))
        if not length:
            raise empty_pass()
    return given * length
