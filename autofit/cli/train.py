"""`autofit train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from autofit.cli.options import MemorySnapshot, Quiet, Result, TrustRemoteCode
from autofit.cli.output import INTERRUPTED, heavy
from autofit.core.errors import InputError
from autofit.core.events import Note
from autofit.models.config_json import is_hub_id


def train(
    context: typer.Context,
    result: Result,
    data: Annotated[Path, typer.Option(help="Text, .jsonl, .csv, .pt of images, an image folder, or a saved Dataset.")],
    weights: Annotated[str | None, typer.Option(metavar="DIR", help="Weights to start from, or a hub id.")] = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Start from random weights.")] = False,
    eval_data: Annotated[Path | None, typer.Option(metavar="PATH", help="Evaluate on it after each pass.")] = None,
    packing: Annotated[
        bool | None,
        typer.Option("--packing/--padding", help="Samples in a row, or each padded; default: packing for plain text."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; default 1.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-4,
    weight_decay: Annotated[float, typer.Option(help="On matrices only.")] = 0.0,
    schedule: Annotated[str, typer.Option(help="Of the learning rate: constant, cosine or linear.")] = "constant",
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the learning rate rises.")] = 0,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="For checkpoints and the model.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --output.")] = False,
    checkpoint_every: Annotated[int, typer.Option(metavar="STEPS", help="Steps between two checkpoints.")] = 200,
    keep_last: Annotated[int, typer.Option(metavar="N", help="Checkpoints that are kept.")] = 2,
    memory_snapshot: MemorySnapshot = False,
    seed: int = 0,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Train the config of a result on a file."""
    if from_scratch == (weights is not None):
        raise InputError("say what to start from.", "Give either --weights DIR or --from-scratch.")
    if weights is not None and not Path(weights).is_dir() and not is_hub_id(weights):
        raise InputError(f"the directory {weights} is not there.", "Check --weights.")
    stderr = Console(stderr=True)
    options = heavy("autofit.train", "TrainOptions")(
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
        trained = heavy("autofit.train", "train_saved")(
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
    Console().print(f"{len(trained.history)} steps, loss {first:.4f} -> {last:.4f}{evaluated}", highlight=False)
    return 0
