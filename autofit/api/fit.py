"""`autofit.fit`: a search, then the training of the user's own model with what it found."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from autofit.api.prepare import named_optimizer
from autofit.api.search import check_alone, log_event, run_shown
from autofit.core.config import Config
from autofit.core.errors import (
    InputError,
    is_whole,
    pluralize,
    require,
    unknown,
)
from autofit.core.events import Event, Listener, Note
from autofit.core.files import check_output, expanded, locked, write_atomically
from autofit.core.layout import Layout, dividing, fitted_to
from autofit.core.learning_rates import default_learning_rate, learning_rate_note
from autofit.core.options import SearchOptions, check_devices, search_options
from autofit.core.place import given_place, is_started_again, note_run
from autofit.core.record import RECORD, Record
from autofit.core.result import Result, SavedResult
from autofit.core.run_directory import JOURNAL
from autofit.core.workload import Hyperparameters, length_of_training
from autofit.distributed.group import joined
from autofit.hardware.device import usual_kind
from autofit.report.explain import nothing_fits
from autofit.report.html import trained_html
from autofit.training import checkpoint
from autofit.training.checkpoint_policy import CheckpointPolicy
from autofit.training.evaluation import Evaluation, EvaluationPlan, Metric
from autofit.training.loop import Callback, StepReport
from autofit.training.metrics import Bar
from autofit.training.on_devices import run_on_devices
from autofit.training.save_model import merged
from autofit.training.session import Session
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
from autofit.tuning.between_steps import notes_between_steps
from autofit.tuning.changed_world import is_of_another_world, refit_to_devices
from autofit.tuning.pipeline import run_search

# In an output directory: the run directory of the search, and its result.
_SEARCH = "search"
_RESULT = "result.yaml"


@dataclass(frozen=True)
class Trained:
    """What `fit` returns.

    Attributes:
        model: the user's own model, trained.
        config: what it was trained with.
        history: a report of each step.
        evaluations: mean losses on eval_loader, each with its `step` and `metrics`.
        result: that of the search, measured now or before; None where the config was given, and
            where the `search/` of a resumed run is gone or its `result.yaml` was edited.
    """

    model: nn.Module
    config: Config
    history: list[StepReport]
    evaluations: list[Evaluation]
    result: Result | None

    def __repr__(self) -> str:
        text = f"Trained: {pluralize(len(self.history), 'step')}"
        if self.history:
            text += f", loss {self.history[0].loss:.4g} -> {self.history[-1].loss:.4g}"
        if self.evaluations:
            text += f", {self.evaluations[-1]:.4g} on eval_loader"
        return text

    def _repr_html_(self) -> str:
        losses = [step.loss for step in self.history]
        samples = sum(step.samples for step in self.history)
        seconds = sum(step.seconds for step in self.history)
        return trained_html(
            losses,
            self.evaluations,
            self.config,
            samples=samples,
            seconds=seconds,
        )

    def merged(self) -> nn.Module:
        """A copy of the model, in memory of its own, with adapters folded into plain layers."""
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
    frozen: Mapping[str, Any] | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    lr: float | None = None,
    weight_decay: float = 0.0,
    schedule: str = "constant",
    warmup_steps: int = 0,
    max_grad_norm: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    config: Mapping[str, Any] | None = None,
    eval_loader: Any = None,
    eval_every: int | None = None,
    metrics: Mapping[str, Metric] | Sequence[Metric] = (),
    keep_best: bool | str = False,
    callbacks: Sequence[Callback] = (),
    output_dir: str | Path | None = None,
    resume: bool | Literal["auto"] = False,
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

    The loader's batch size is the effective batch: each batch is one optimizer step, split into
    micro-batches as the config says.

    The model is trained in place. Of a model in train mode, modules in eval mode (a frozen
    BatchNorm) stay so; a model in eval mode, as `from_pretrained` returns it, is put into train
    mode. It trains without a cache of keys and values, and with no checkpointing but the config's.
    Modes, cache and checkpointing are put back afterwards. The weights stay on the device they were
    trained on, in the format they came in unless `config`, `space` or `set` asks for another.

    Args:
        loss: (model, batch) -> scalar mean, or (sum, number of its terms); default: the model's
            own. What it averages over is found by gradients of a few samples; one that is no such
            mean is not split into micro-batches.
        split: (batch, size) -> a list of micro-batches, for samples that are not along dim 0.
        count: batch -> number of the terms that the loss averages over, where that is not found by
            itself.
        frozen: further models that the loss asks, which are not trained, by name: modules, which
            get to the device in the format of frozen weights and stay there, functions that make
            them, or None for a copy of the model as it is now. The loss then gets
            (models, batch), where models["model"] is the trained one. Those of `autofit.losses`
            that ask the model before training need none.
        lr: the learning rate, the maximum of the schedule; default: 2e-5 where all weights are
            trained, 2e-4 beside adapters, of which a note tells.
        epochs, steps: how long, one of them; default: one pass over the loader.
        optimizer: a value of the knob of that name, or a function from parameter groups to an
            optimizer of one's own, whose learning rate the loop sets; default: the search chooses.
        config: train with this one, without a search.
        eval_loader: evaluated after each pass over the loader and at the end.
        eval_every: evaluate after so many steps instead, and at the end.
        metrics: functions, or a mapping of names to functions, that give a number of `(outputs,
            batch)`, the model's own of some samples and those samples; their mean over samples is
            reported. One of `(model, loader)`, with these names, is called once.
        keep_best: the model ends with the weights of the evaluation with the lowest loss, or with
            the highest value of the metric of this name.
        callbacks: functions of a StepReport, called after every optimizer step. One that returns
            `autofit.STOP` ends the training after it, with a checkpoint; `report.evaluations` are
            those before the step, also of a run that is resumed.
        output_dir: receives the run directory (`search/`) and its `result.yaml`, a checkpoint every
            `checkpoint_every` steps (the `keep_last` newest stay), `metrics.jsonl`, and the trained
            `model/`.
        resume: continue in `output_dir` from its last checkpoint; "auto": where there is one.
        space: the space to search; default: `full`, as far as weights keep the format (dtype) they
            came in, unless `set` says otherwise.
        search: "auto" uses the cached result of a search for the same model, data shape, hardware,
            options and versions, where there is one; "always" searches again.
        worst_case: a batch of the largest samples there are; default: the largest of the loader's
            first `peek` batches, and of the longest samples of its data set, where that can be
            indexed and shows their lengths.
        progress: show a bar, or where there is no terminal a line now and then; default: a bar, on
            a terminal and in a notebook.
        listener: called with every event; default: the logger `autofit`.
        restart: called when memory ran out in the middle of an update, to resume in a fresh process
            (`autofit train` starts itself again); default: this process goes back to the last
            checkpoint.
        devices: how many of this machine train together, each in a process of its own; default: as
            many as the config is for, else one. A search measures on as many. Under torchrun or
            srun each process takes its place among those that were started, with a config.
        nodes: how many machines; more than one are started by torchrun or srun.
        options: those of `search`: gpu_mem, gpu, device, mem, set, trials, time_limit, ...

    Raises:
        InputError: an argument is wrong, or the loss is no longer finite; NothingFitsError: no
        config fits; ProbeError: probes cannot run here; OutOfMemoryError: memory ran out, and no
        fallback is left.
    """
    rule = "config must be an autofit.Config or a mapping of knobs"
    require(config is None or isinstance(config, Mapping), rule, config, "Or leave it out.")
    fine = isinstance(callbacks, Sequence) and all(map(callable, callbacks))
    remedy = "Write callbacks=(function,)."
    require(fine, "callbacks must be a tuple of functions", callbacks, remedy)
    if search not in ("auto", "always"):
        raise unknown("value for search", search, ("auto", "always"))
    for name, function in ("listener", listener), ("restart", restart):
        require(function is None or callable(function), f"{name} must be a function", function)
    fine = isinstance(resume, bool) or resume == "auto"
    require(fine, 'resume must be True, False or "auto"', resume)
    fine = progress is None or isinstance(progress, bool)
    require(fine, "progress must be True or False", progress)
    fine = eval_loader is None or callable(eval_loader) or isinstance(eval_loader, Iterable)
    rule = "eval_loader must be an iterable of batches"
    require(fine, rule, eval_loader, "Leave it out for none.")
    evaluation = _evaluation_plan(eval_loader, eval_every, metrics, keep_best)
    search_options(space=space, seed=seed, **options)  # before anything is made of them
    check_devices(devices, nodes)

    place = given_place()
    is_first = place is None or not place.rank
    if nodes > 1 and place is None:
        message = f"{nodes} nodes are to train together, and this process was started alone"
        remedy = f"Start it on each: torchrun --nnodes {nodes} --nproc-per-node ... SCRIPT."
        raise InputError(f"{message}.", remedy)

    directory = None
    is_resumed = bool(resume)
    if output_dir is not None:
        directory = expanded(output_dir, "output_dir").absolute()
        if resume == "auto":
            is_resumed = directory.is_dir()
        is_resumed = is_resumed or is_started_again(directory)

    listener = _without_repeats(listener or log_event)
    if not is_first:
        listener = _silent

    settings = dict(options.pop("set", {}))
    fixed = named_optimizer(optimizer)
    if config is None:
        settings |= fixed
        check_alone("Give config=, or start it once, with devices=.")
    else:
        config = {**config, **fixed}

    world = devices or Layout.of(config or {}).world
    if place:
        world = place.world

    with contextlib.ExitStack() as stack:
        if is_first:
            stack.enter_context(_claimed(directory, is_resumed, listener))

        make_workload = workload_from if config is None else training_workload
        workload = make_workload(
            model,
            loader,
            loss,
            optimizer=optimizer if callable(optimizer) else None,
            split=split,
            count=count,
            frozen=frozen,
            peek=Peek(worst_case, peek),
        )
        if config is None and space is None:
            workload = dataclasses.replace(workload, keeps=dtypes_to_restore(model, settings))

        session = Session(
            workload,
            model,
            Hyperparameters(
                Hyperparameters.lr if lr is None else lr,
                weight_decay,
                schedule,
                warmup_steps,
                max_grad_norm,
                seed,
            ),
            CheckpointPolicy(directory, is_resumed, checkpoint_every, keep_last),
            callbacks=tuple(callbacks),
            listener=lambda text: listener(Note(text)),
            progress=Bar.wanted() if progress is None else progress,
            restart=restart,
            # A process that may be started again ends then: no device need hold the whole model.
            taken=_silent if restart and place else None,
        )

        total_steps = length_of_training(epochs, steps)
        passes = None
        if steps is None:
            passes = total_steps
            total_steps = passes * _batches_in(loader)

        effective = workload.effective_batch_size
        if place is None:
            fewer = dividing(config or {}, world, effective)[0]
            if fewer < world:
                samples = pluralize(effective, "sample")
                note = f"{samples} do not divide among {world} devices: {fewer} of them train."
                listener(Note(note))
                world = fewer

        result = None
        if config is None:
            if max_grad_norm is not None:  # which needs all gradients at once
                settings = {"optimizer_in_backward": False, **settings}
            checked = search_options(
                space=space or "full",
                devices=world,
                seed=seed,
                set=settings,
                **options,
            )
            cards = torch.cuda.device_count()
            if checked.wanted_device != "cpu" and 0 < cards < world:
                here = pluralize(cards, "card")
                message = f"{world} devices are to train, and this machine has {here}."
                remedy = "Give fewer devices. For a config that trains elsewhere: autofit.search."
                raise InputError(message, remedy)

            config, device, result = _searched(
                session,
                checked,
                listener,
                reuse=search == "auto",
            )
        else:
            checked = search_options(set=settings, **options)
            device = checked.wanted_device

        if place is None and is_of_another_world(config, world):
            world, config = refit_to_devices(
                config,
                world,
                workload,
                model,
                options=checked,
                listener=listener,
            )
        config = fitted_to(config, world, effective)
        if lr is None:
            listener(Note(learning_rate_note(config)))
            rate = default_learning_rate(config)
            learning = dataclasses.replace(session.hyperparameters, lr=rate)
            session = dataclasses.replace(session, hyperparameters=learning)

        # On one device, saving takes next to nothing.
        if is_first and (evaluation or (directory and world > 1)):
            for note in notes_between_steps(
                config,
                workload,
                model,
                options=checked,
                device=device,
                world=world,
                is_evaluated=evaluation is not None,
                is_saved=directory is not None,
                starts_ranks=world > 1 and place is None,
            ):
                listener(Note(note))

        run = session.run
        if world > 1:
            device = device or usual_kind()
            if place is None:
                run = functools.partial(run_on_devices, session, devices=world)
            elif not torch.distributed.is_initialized():
                stack.enter_context(joined(place, device))
        history, evaluations = run(
            config,
            device,
            loader,
            steps=total_steps,
            epochs=passes,
            evaluation=evaluation,
        )
        return Trained(model, Config(config), history, evaluations, result)


def _evaluation_plan(
    loader: Any,
    every: int | None,
    metrics: Mapping[str, Metric] | Sequence[Metric],
    keep_best: bool | str,
) -> EvaluationPlan | None:
    """What is evaluated; None without an eval_loader. Raises InputError for what has no meaning."""
    rule = "metrics must be functions, or a mapping of names to functions"
    if not isinstance(metrics, Mapping):
        require(isinstance(metrics, Sequence), rule, metrics, "Write metrics=(function,).")
        metrics = {getattr(metric, "__name__", str(metric)): metric for metric in metrics}
    require(all(map(callable, metrics.values())), rule, metrics, "Write metrics=(function,).")
    require("loss" not in metrics, 'a metric cannot be called "loss"', "loss", "Rename it.")

    fine = every is None or is_whole(every, 1)
    require(fine, "eval_every must be a positive number of steps", every)
    if keep_best is True:
        keep_best = "loss"
    is_known = isinstance(keep_best, str) and (keep_best == "loss" or keep_best in metrics)
    fine = keep_best is False or is_known
    rule = "keep_best must be True, False or the name of a metric"
    require(fine, rule, keep_best, "For example keep_best=True, which keeps the lowest loss.")

    if loader is None:
        if every is not None or metrics or keep_best:
            message = "eval_every, metrics and keep_best need data to evaluate on."
            raise InputError(message, "Give eval_loader.")
        return None
    return EvaluationPlan(loader, every, metrics, keep_best or None)


def _without_repeats(listener: Listener) -> Listener:
    """The listener without notes that it got before: search and training find the same."""
    seen: set[str] = set()

    @functools.wraps(listener)
    def listen(event: Event) -> None:
        if isinstance(event, Note):
            if event.text in seen:
                return
            seen.add(event.text)
        listener(event)

    return listen


def _silent(_: Any) -> None:
    """No-op listener: of events on ranks above 0, and of a trained model that nobody needs back."""


def _searched(
    session: Session,
    options: SearchOptions,
    listener: Listener,
    *,
    reuse: bool,
) -> tuple[Config, str | None, Result | None]:
    """The config to train with, its device, and the result: that of the run which is resumed, a
    cached one, or that of a new search.

    The result is saved beside the checkpoints. Raises NothingFitsError.
    """
    directory = session.policy.directory
    out = options.out
    saved = None
    if directory is not None:
        out = out or directory / _SEARCH
        saved = directory / _RESULT
        if session.policy.resume and saved.exists():
            return _resumed(saved, out)

    key = result_cache.key_of(session.workload, options)
    cached = result_cache.find(key) if reuse else None
    if cached is not None:
        listener(Note(f'{cached.describe()}; search="always" searches again.'))
        for note in session.workload.notes:
            listener(Note(note))
        result = cached.result()
        if out is not None:
            result = cached.write(out, session.workload, session.listener)
    else:
        if out is not None and options.out is None:
            is_begun = (out / JOURNAL).exists()
            options = options.model_copy(update={"out": out, "resume": is_begun})
        result = run_shown(run_search, session.workload, options, listener, session.model)
        if result.best is None:
            raise nothing_fits(result)
        result_cache.save(key, result)

    if saved is not None:
        saved.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(saved, result.to_yaml())
    assert result.best is not None, "no other is cached"
    return result.best.config, result.hardware.device, result


def _resumed(path: Path, out: Path) -> tuple[Config, str | None, Result | None]:
    """What the result.yaml that a run began with says, and its result where the run directory of
    the search is still there and found that config."""
    saved = SavedResult.load(path)
    result = None
    with contextlib.suppress(InputError):
        record = Record.load(out / RECORD)
        if record.intact and record.result.config == saved.config:  # the file may have been edited
            result = record.result
    return saved.config, saved.hardware.get("device"), result


@contextlib.contextmanager
def _claimed(directory: Path | None, resume: bool, listener: Listener) -> Iterator[None]:
    """Hold an output directory for this training alone; checked before a search, which takes long.

    Raises:
        InputError: it cannot be written to, is in use, or holds a run that is not to be resumed. A
            run that was killed before its first checkpoint begins anew.
    """
    check_output(directory, resume)
    if directory is None:
        yield
        return

    if not resume and checkpoint.exists(directory):
        message = f"{directory} already holds a training run."
        remedy = 'Resume it (resume="auto"), or choose another output directory.'
        raise InputError(message, remedy)

    with contextlib.ExitStack() as held:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(directory / ".lock"))
            with tempfile.TemporaryFile(dir=directory):
                pass
        except BlockingIOError as error:
            message = f"{directory} is in use by another training."
            remedy = "Wait for it to end, or choose another output directory."
            raise InputError(message, remedy) from error
        except OSError as error:
            message = f"{directory} cannot be written to: {error.strerror}."
            remedy = "Choose an output directory that can be written to."
            raise InputError(message, remedy) from error

        note_run(directory)
        if resume and not checkpoint.exists(directory):
            note = f"there is no checkpoint in {directory} yet: the training begins anew."
            listener(Note(note))
        yield


def _batches_in(loader: Any) -> int:
    """The number of batches in a pass; those of a loader without a length are counted."""
    length = length_of(loader)
    if length is None:
        with put_back(loader):
            length = sum(1 for _ in batches_of(loader))
        if not length:
            raise empty_pass()
    return length
