"""`autofit train`."""

import os
import sys
from typing import NoReturn

import typer

import autofit.cli.options as options
import autofit.cli.picture_options as picture_options
from autofit.cli.output import INTERRUPTED, heavy
from autofit.core.environment import importing_alike
from autofit.core.errors import InputError, pluralize
from autofit.core.events import Event, Note
from autofit.core.files import check_output, check_readable
from autofit.core.knobs import check_knobs
from autofit.core.options import check_devices, loss_options_of
from autofit.core.place import given_place
from autofit.core.quoting import shell_path
from autofit.core.result import SavedResult
from autofit.core.workload import (
    LEARNT,
    Hyperparameters,
    check_counts,
    check_learn,
    length_of_training,
)
from autofit.models import named_by
from autofit.models.config_json import check_weights
from autofit.models.diffusion.samples import check_samples
from autofit.report.terminal import Terminal


def train(
    context: typer.Context,
    result: options.Result,
    data: options.Data,
    weights: options.Weights = None,
    allow_missing: options.AllowMissing = False,
    teacher_weights: options.TeacherWeights = None,
    from_scratch: options.FromScratch = False,
    eval_data: options.EvalData = None,
    packing: options.Packing = None,
    by_shape: picture_options.ByShape = False,
    learn: options.Learn = LEARNT[0],
    trust_remote_code: options.TrustRemoteCode = False,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    lr: options.LearningRate = None,
    loss_option: options.LossOption = None,
    weight_decay: options.WeightDecay = 0.0,
    schedule: options.Schedule = "constant",
    warmup_steps: options.WarmupSteps = 0,
    max_grad_norm: options.MaxGradNorm = None,
    seed: options.TrainSeed = 0,
    devices: options.TrainDevices = None,
    output: options.TrainOutput = None,
    resume: options.ResumeTraining = False,
    auto_resume: options.AutoResume = False,
    checkpoint_every: options.CheckpointEvery = 200,
    keep_last: options.KeepLast = 2,
    sample_every: picture_options.SampleEvery = None,
    sample_prompt: picture_options.SamplePrompt = None,
    memory_snapshot: options.MemorySnapshot = False,
    quiet: options.Quiet = False,
) -> int:
    """Train the config of a result on data of yours.

    Examples:
      autofit train run/result.yaml --data data.jsonl --weights ./llama-3.1-8b --output trained
      autofit train run/result.yaml --data corpus.txt --from-scratch --steps 100
    """
    if from_scratch == (weights is not None):
        raise InputError("say what to start from.", "Give either --weights DIR or --from-scratch.")
    for folder in filter(None, (weights, teacher_weights)):
        check_weights(folder)
    if memory_snapshot and output is None:
        raise InputError("--memory-snapshot has nowhere to write to.", "Give --output DIR.")
    prompts = sample_prompt or []
    check_samples(sample_every, prompts, output=output, weights=weights)
    rate = Hyperparameters.lr if lr is None else lr
    Hyperparameters(rate, weight_decay, schedule, warmup_steps, max_grad_norm, seed)
    length_of_training(epochs, steps)
    check_learn(learn)
    loss_options = loss_options_of(loss_option)
    check_devices(devices, 1)
    check_counts(checkpoint_every=checkpoint_every, keep_last=keep_last)

    saved = SavedResult.load(result)
    named_by(saved.source)
    check_knobs(saved.config)
    for path in filter(None, (data, eval_data)):
        check_readable(path, "the data file")
    if auto_resume:
        resume = output is not None and output.is_dir()
    check_output(output, resume)

    place = given_place()
    is_first = place is None or not place.rank  # the others know the same
    stderr = Terminal(stderr=True)

    def print_note(event: Event) -> None:
        if isinstance(event, Note) and is_first:
            stderr.print(event.text, markup=False, highlight=False, soft_wrap=True)

    def restart() -> NoReturn:
        resumed = () if resume or auto_resume else ("--resume",)
        command = [sys.executable, "-P", "-m", "autofit", *context.obj, *resumed]
        os.execve(sys.executable, command, importing_alike())

    try:
        trained = heavy("autofit.api.train", "train")(
            result,
            data,
            weights=weights,
            allow_missing=allow_missing,
            teacher_weights=teacher_weights,
            loss_options=loss_options,
            eval_data=eval_data,
            packing=packing,
            by_shape=by_shape,
            learn=learn,
            trust_remote_code=trust_remote_code,
            steps=steps,
            epochs=epochs,
            lr=lr,
            weight_decay=weight_decay,
            schedule=schedule,
            warmup_steps=warmup_steps,
            max_grad_norm=max_grad_norm,
            seed=seed,
            devices=devices,
            output=output,
            resume=resume,
            checkpoint_every=checkpoint_every,
            keep_last=keep_last,
            sample_every=sample_every,
            sample_prompts=prompts,
            memory_snapshot=memory_snapshot,
            progress=not quiet,
            listener=print_note,
            restart=restart,
        )
    except KeyboardInterrupt:
        remedy = "with --output it could be resumed"
        if output and output.exists():
            remedy = f"go on with --resume --output {shell_path(str(output))}"
        elif output:
            remedy = "nothing was trained yet"
        stderr.print(f"interrupted; {remedy}", markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED

    if not is_first:
        return 0
    if not trained.history:
        message = f"nothing left to train: {output} holds the finished run"
        Terminal().print(message, markup=False, highlight=False)
        return 0

    first, last = trained.history[0].loss, trained.history[-1].loss
    answer = f"{pluralize(len(trained.history), 'step')}, loss {first:.4f} -> {last:.4f}"
    if trained.evaluations:
        answer += f", evaluation loss {trained.evaluations[-1]:.4f}"
    Terminal().print(answer, highlight=False)
    return 0
