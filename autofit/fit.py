"""The Python faces: `search` for the answer, `fit` for the trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError, NothingFitsError
from autofit.core.events import Note
from autofit.core.hardware import GIB
from autofit.core.hyperparameters import Hyperparameters
from autofit.core.options import search_options
from autofit.core.result import Result, SavedResult
from autofit.core.workload import Workload
from autofit.memory.device import detect
from autofit.models import resolve
from autofit.report import explain
from autofit.setup import Setup
from autofit.training import checkpoint, random_state, saving
from autofit.training.build import build
from autofit.training.inspect import loss_splits
from autofit.training.loader import batches_of, workload_from
from autofit.training.loop import StepReport, evaluate, train
from autofit.training.passes import Passes
from autofit.tune import Listener, run_search

__all__ = ["Trained", "explain", "fit", "nothing_fits", "search"]

_SEARCH = "search"  # the run directory inside an output directory


@dataclass(frozen=True)
class Trained:
    """What `fit` hands back: the user's own model, trained; one report per step; the search's result, if one ran.

    `evaluations` are the mean losses on eval_loader, one after each pass over the loader and one at the end.
    """

    model: nn.Module
    history: list[StepReport]
    result: Result | None
    evaluations: list[float]


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
            out, resume, probe_timeout: as on the command line.

    Returns:
        The result; its `best` is None when nothing fits.

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
    return run_search(workload, checked, listener)


def fit(
    model: nn.Module,
    loader: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    lr: float,
    weight_decay: float = 0.0,
    schedule: str = "constant",
    warmup_steps: int = 0,
    max_grad_norm: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    config: Mapping[str, Any] | None = None,
    eval_loader: Any = None,
    callbacks: tuple[Callable[[StepReport], None], ...] = (),
    output_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 200,
    keep_last: int = 2,
    seed: int = 0,
    space: str = "full",
    listener: Listener | None = None,
    **options: Any,
) -> Trained:
    """Search for the fastest config that fits, then train the user's own model with it.

    The loader's batch size is the effective batch: each of its batches is one optimizer step, cut into micro-batches
    as the config says. `config` skips the search. With `output_dir` the run directory (`search/`) and checkpoints are
    kept there, one every `checkpoint_every` steps and the last `keep_last` of them, and `resume` goes on from the last
    one. `options` are those of `search`.

    Raises:
        InputError: something given is wrong; NothingFitsError: no config fits; ProbeError: probes cannot run here.
    """
    if config is not None and not isinstance(config, Mapping):
        given = type(config).__name__
        raise InputError(f"config must be an autofit.Config or a mapping of knobs, not a {given}.", "Or leave it out.")
    if callable(callbacks):
        raise InputError("callbacks must be a tuple of functions, not one function.", "Write callbacks=(function,).")
    checkpoint.check_counts(checkpoint_every=checkpoint_every, keep_last=keep_last)
    run = _Training(
        workload=workload_from(model, loader, loss),
        model=model,
        hyperparameters=Hyperparameters(lr, weight_decay, schedule, warmup_steps, max_grad_norm, seed),
        directory=_directory(output_dir, resume),
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        callbacks=callbacks,
        listener=listener or (lambda _: None),
    )
    total = _total_steps(loader, epochs, steps)
    result = None
    if config is None:
        config, result = run.find_config(space, options)
    device = result.hardware.device if result else search_options(**options).wanted_device
    history, evaluations = run.train(config, device, loader, total=total, eval_loader=eval_loader)
    return Trained(model, history, result, evaluations)


@dataclass(frozen=True)
class _Training:
    """One training run of a living model: what is trained, how, and where it is kept."""

    workload: Workload
    model: nn.Module
    hyperparameters: Hyperparameters
    directory: Path | None
    resume: bool
    checkpoint_every: int
    keep_last: int
    callbacks: tuple[Callable[[StepReport], None], ...]
    listener: Listener

    def find_config(self, space: str, options: dict[str, Any]) -> tuple[Mapping[str, Any], Result | None]:
        """The config of a search; that of the stored one when a run is resumed."""
        out = self.directory / _SEARCH if self.directory else None
        if self.resume and out and (out / "result.yaml").exists():
            return SavedResult.load(out / "result.yaml").config, None
        options = {"out": out, "seed": self.hyperparameters.seed, **options}
        if self.hyperparameters.max_grad_norm is not None:  # which needs all gradients at once
            options["set"] = {"optimizer_in_backward": False, **options.get("set", {})}
        options.setdefault("resume", bool(out and (out / "journal.log").exists()))
        result = run_search(self.workload, search_options(space=space, **options), self.listener)
        if result.best is None:
            raise nothing_fits(result)
        return result.best.config, result

    def train(
        self, config: Mapping[str, Any], device: str | None, loader: Any, *, total: int, eval_loader: Any
    ) -> tuple[list[StepReport], list[float]]:
        """Train the model itself and give it back without wrappers; its reports and evaluations."""
        torch.manual_seed(self.hyperparameters.seed)
        setup = build(self.workload, config, detect(device), model=self.model, hyperparameters=self.hyperparameters)
        try:
            for warning in setup.warnings:
                self.listener(Note(warning))
            self._check_split(setup)
            return self._loop(setup, loader, total, eval_loader)
        finally:
            setup.close()

    def _check_split(self, setup: Setup) -> None:
        """A loss that cannot be split must not be, whoever chose the config."""
        if setup.micro_batch_size >= self.workload.effective_batch_size:
            return
        splits, note = loss_splits(setup, self.workload.batch(min(4, self.workload.effective_batch_size)))
        if not splits:
            whole = self.workload.effective_batch_size
            raise InputError(str(note), f"Set micro_batch_size to {whole}, or leave the config to the search.")

    def _loop(self, setup: Setup, loader: Any, total: int, eval_loader: Any) -> tuple[list[StepReport], list[float]]:
        batches = Passes(loader, self.hyperparameters.seed)
        first = self._go_on(setup, batches)
        evaluations: list[float] = []
        per_pass = _length(loader)

        def after(report: StepReport) -> None:
            done = report.step + 1
            if self.directory and (done % self.checkpoint_every == 0 or done == total):
                checkpoint.save(setup, self.directory, done, keep_last=self.keep_last, data_state=batches.state())
            if eval_loader is not None and (done == total or (per_pass and done % per_pass == 0)):
                with random_state.kept(setup.device):  # a resumed run does not draw them again
                    evaluations.append(evaluate(setup, batches_of(eval_loader)))

        history = train(setup, batches, steps=total, first_step=first, callbacks=(*self.callbacks, after))
        if self.directory:
            saving.save_model(setup, self.directory / "model")
        return history, evaluations

    def _go_on(self, setup: Setup, batches: Passes) -> int:
        """The step to begin with, with the batches before it taken: 0, or where a resumed run was."""
        if not (self.resume and self.directory and checkpoint.exists(self.directory)):
            return 0  # also where the search was finished, but no training was kept yet
        loaded = checkpoint.load(setup, self.directory)
        for note in loaded.notes:
            self.listener(Note(note))
        batches.go_on(loaded.next_step, loaded.data_state, setup.device)
        return loaded.next_step


def nothing_fits(result: Result) -> NothingFitsError:
    """The error that says by how much the nearest config missed the budget."""
    budget = f"{result.budget.device_bytes / GIB:.2f} GiB"
    miss = result.nearest_miss
    if miss is None or miss.peak_bytes is None:
        return NothingFitsError(f"no config of the space could be run in {budget}.", "See the run directory's probes/.")
    needs = f"the nearest needs {miss.peak_bytes.allocated / GIB:.2f} GiB"
    return NothingFitsError(
        f"no config that was tried fits {budget}: {needs}.", "Allow more memory, a wider space, or more trials."
    )


def _only_for_living_models(loader: Any, loss: Any) -> None:
    if loader is not None or loss is not None:
        message = "a loader and a loss belong to a living model."
        raise InputError(message, "A Workload has its own batch and loss; a name's are made for it.")


def _directory(output_dir: str | Path | None, resume: bool) -> Path | None:
    if output_dir is None:
        if resume:
            raise InputError("to resume, the directory must be named.", "Give output_dir.")
        return None
    directory = Path(output_dir)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file, not a directory.", "Choose another output directory.")
    if not resume and checkpoint.exists(directory):
        raise InputError(f"{directory} already holds a training run.", "Resume it, or choose another output directory.")
    if resume and not checkpoint.exists(directory) and not (directory / _SEARCH).exists():
        raise InputError(f"there is no run to resume in {directory}.", "Leave out resume, or check the directory.")
    return directory


def _total_steps(loader: Any, epochs: int | None, steps: int | None) -> int:
    """Optimizer steps in all: one for each batch of the loader.

    Raises:
        InputError: both given, not positive, or epochs of a loader whose length is not known.
    """
    if epochs is not None and steps is not None:
        raise InputError("epochs and steps both say how long to train.", "Give one of them.")
    given = steps if steps is not None else epochs if epochs is not None else 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InputError(f"the length of training must be a positive whole number, not {given!r}.")
    if steps is not None:
        return steps
    length = _length(loader)
    return given * (sum(1 for _ in batches_of(loader)) if length is None else length)


def _length(loader: Any) -> int | None:
    """How many batches a pass has, where that is known without reading one."""
    try:
        return len(loader)
    except TypeError:  # also of a DataLoader over an IterableDataset, which has a length only by its looks
        return None
