"""`autofit train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

from autofit.cli.options import (
    CheckpointEvery,
    Data,
    Epochs,
    EvalData,
    FromScratch,
    KeepLast,
    LearningRate,
    MaxGradNorm,
    MemorySnapshot,
    Packing,
    Quiet,
    Result,
    ResumeTraining,
    Schedule,
    Steps,
    TrainOutput,
    TrainSeed,
    TrustRemoteCode,
    WarmupSteps,
    WeightDecay,
    Weights,
)
from autofit.cli.output import INTERRUPTED, heavy
from autofit.core.errors import InputError, counted
from autofit.core.events import Note
from autofit.models.config_json import is_hub_id


def train(
    context: typer.Context,
    result: Result,
    data: Data,
    weights: Weights = None,
    from_scratch: FromScratch = False,
    eval_data: EvalData = None,
    packing: Packing = None,
    trust_remote_code: TrustRemoteCode = False,
    steps: Steps = None,
    epochs: Epochs = None,
    lr: LearningRate = 1e-4,
    weight_decay: WeightDecay = 0.0,
    schedule: Schedule = "constant",
    warmup_steps: WarmupSteps = 0,
    max_grad_norm: MaxGradNorm = None,
    seed: TrainSeed = 0,
    output: TrainOutput = None,
    resume: ResumeTraining = False,
    checkpoint_every: CheckpointEvery = 200,
    keep_last: KeepLast = 2,
    memory_snapshot: MemorySnapshot = False,
    quiet: Quiet = False,
) -> int:
    """Train the config of a result on data of yours.

    Examples:
      autofit train run/result.yaml --data data.jsonl --weights ./llama-3.1-8b --output trained
      autofit train run/result.yaml --data corpus.txt --from-scratch --steps 100
    """
    if from_scratch == (weights is not None):
        raise InputError("say what to start from.", "Give either --weights DIR or --from-scratch.")
    if weights is not None and not Path(weights).is_dir() and not is_hub_id(weights):
        raise InputError(f"the directory {weights} is not there.", "Check --weights.")
    stderr = Console(stderr=True)
    options = heavy("autofit.api.train", "TrainOptions")(
        weights=weights,
        eval_data=eval_data,
        packing=packing,
        steps=steps,
        epochs=epochs,
        lr=lr,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup_steps=warmup_steps,
        max_grad_norm=max_grad_norm,
        output=output,
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        memory_snapshot=memory_snapshot,
        seed=seed,
        trust_remote_code=trust_remote_code,
        progress=stderr.is_terminal and not quiet,
    )

    def report(step: Any) -> None:
        if not quiet and not options.progress:
            stderr.print(f"step {step.step + 1}: loss {step.loss:.4f}", highlight=False)

    def note(event: Any) -> None:
        if isinstance(event, Note):
            stderr.print(event.text, markup=False, highlight=False, soft_wrap=True)

    def restart() -> NoReturn:
        resumed = () if resume else ("--resume",)
        os.execv(sys.executable, [sys.executable, "-m", "autofit", *context.obj, *resumed])

    try:
        trained = heavy("autofit.api.train", "train_saved")(
            result, data, options, callbacks=(report,), listener=note, restart=restart
        )
    except KeyboardInterrupt:
        going_on = f"; go on with --resume --output {output}" if output else "; with --output it could be resumed"
        stderr.print(f"interrupted{going_on}", highlight=False, soft_wrap=True)
        return INTERRUPTED
    if not trained.history:
        Console().print(f"nothing left to train: {output} holds the finished run", highlight=False)
        return 0
    first, last = trained.history[0].loss, trained.history[-1].loss
    evaluated = f", evaluation loss {trained.evaluations[-1]:.4f}" if trained.evaluations else ""
    Console().print(
        f"{counted(len(trained.history), 'step')}, loss {first:.4f} -> {last:.4f}{evaluated}", highlight=False
    )
    return 0
