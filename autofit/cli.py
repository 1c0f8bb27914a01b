"""The command line: the only room that parses arguments, prints to the user or sets an exit code.

Progress goes to stderr, the answer to stdout; with --json stdout holds exactly one JSON object, also when all goes
wrong. What is heavy is reached by name when a command runs, so that `autofit --help` answers at once.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from autofit.core.environment import set_defaults
from autofit.core.errors import AutofitError, InputError, NothingFitsError, ProbeError
from autofit.core.events import Note
from autofit.core.options import parse_settings, seconds_of
from autofit.export.tools import describe_tools
from autofit.models import describe_presets
from autofit.models.config_json import is_hub_id
from autofit.report import (
    LiveDisplay,
    around_table,
    cards_table,
    cleared_text,
    doctor_table,
    estimate_table,
    models_table,
    nothing_fits_text,
    result_table,
    spaces_table,
    tools_table,
)

INTERRUPTED = 130
# typer ships its own copy of click or uses click itself, by version; this is whichever it is.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]


class _Commands(TyperGroup):
    """typer ends on Ctrl-C without a word; here it is told as every other end is."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


app = typer.Typer(
    cls=_Commands,
    help="Find the fastest PyTorch training configuration that fits your memory, by measuring real steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Model = Annotated[
    str, typer.Option("--model", help="A preset, a directory with config.json, a hub id, or file.py:function.")
]


@app.command()
def search(
    model: Model,
    gpu_mem: Annotated[str | None, typer.Option(metavar="GIB", help="Memory of the card to fit.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="The card to fit, such as rtx-4090.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: CUDA where there is a card.")] = None,
    mem: Annotated[str | None, typer.Option(metavar="GIB", help="Memory for tensors on the CPU.")] = None,
    host_mem: Annotated[str | None, typer.Option(metavar="GIB", help="Host memory; default 80 % of free.")] = None,
    margin: Annotated[float, typer.Option(help="Fraction of the card kept free.")] = 0.05,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sample; default 2048 or the model's most.")] = None,
    effective_batch: Annotated[int | None, typer.Option(help="Samples per optimizer step; default 32.")] = None,
    space: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="See `autofit spaces`.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE[,VALUE...]", help="Fix or narrow a knob.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Probes at most.")] = 40,
    time_limit: Annotated[str | None, typer.Option(metavar="TIME", help="For example 10m.")] = None,
    tolerance: Annotated[float, typer.Option(help="A difference in speed that is none: for ties, and to end.")] = 0.03,
    seed: int = 0,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Probes at a time; default: one on each card like card 0; a CPU: 1.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run directory; default autofit-runs/...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in --out.")] = False,
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Know nothing of earlier searches, and keep nothing for later ones.")
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code.")] = False,
) -> int:
    """Find, prove and write down the fastest config that fits."""
    stderr = Console(stderr=True)
    about: dict[str, Any] = {
        "seq_len": seq_len,
        "effective_batch": effective_batch,
        "trust_remote_code": trust_remote_code,
        "gpu_mem": gpu_mem,
        "gpu": gpu,
        "device": device,
        "mem": mem,
        "host_mem": host_mem,
        "margin": margin,
        "space": space,
        "set": parse_settings(set_ or []),
        "trials": trials,
        "tolerance": tolerance,
        "seed": seed,
    }
    limit = None if time_limit is None else seconds_of(time_limit)
    here = {"time_limit": limit, "workers": workers, "out": out, "resume": resume, "store": not no_store}
    try:
        with LiveDisplay(stderr, quiet=quiet) as listener:
            result = _heavy("autofit.fit", "search")(model, listener=listener, **here, **about)
    except ProbeError as error:
        if gpu_mem is None and gpu is None:
            raise
        return _only_predicted(error, _heavy("autofit.predict", "expected_best")(model, **about), as_json)
    if as_json:
        _print_json(result.to_json())
    elif result.best is not None:
        Console().print(result_table(result, tolerance=tolerance))
    if result.stopped_by == "interrupt":
        stderr.print(f"interrupted; go on with --resume --out {result.run_directory}")
        return INTERRUPTED
    if result.best is None:
        stderr.print(nothing_fits_text(result))
        return NothingFitsError.exit_code
    return 0


@app.command()
def estimate(
    model: Model,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A config or a result.yaml; default: a plain start.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Set a knob.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="A card such as rtx-4090, or list: all.")] = None,
    gpu_mem: Annotated[str | None, typer.Option(metavar="GIB", help="Memory of the card to fit.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: CUDA where there is a card.")] = None,
    mem: Annotated[str | None, typer.Option(metavar="GIB", help="Memory for tensors on the CPU.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sample; default 2048 or the model's most.")] = None,
    effective_batch: Annotated[int | None, typer.Option(help="Samples per optimizer step; default 32.")] = None,
    alternatives: Annotated[
        bool | None,
        typer.Option("--alternatives/--no-alternatives", help="What changes would bring; default: not with --json."),
    ] = None,
    as_json: Json = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code.")] = False,
) -> int:
    """Predict memory and speed of a config, without a GPU and without weights."""
    asked: dict[str, Any] = {
        "set": parse_settings(set_ or []),
        "seq_len": seq_len,
        "effective_batch": effective_batch,
        "trust_remote_code": trust_remote_code,
    }
    if gpu == "list":
        if any(each is not None for each in (gpu_mem, device, mem)):
            raise InputError("--gpu list is about whole cards.", "Leave out --gpu-mem, --device and --mem.")
        cards = _heavy("autofit.nearby", "fitting_cards")(model, config, **asked)
        _print_json(cards) if as_json else Console().print(cards_table(cards))
        return 0
    prediction = _heavy("autofit.predict", "ask")(
        model, config, gpu=gpu, gpu_mem=gpu_mem, device=device, mem=mem, **asked
    )
    answer = prediction.to_dict()
    if not as_json:  # before the rest, which takes longer
        Console().print(estimate_table(answer))
    if alternatives or (alternatives is None and not as_json):
        answer |= _heavy("autofit.nearby", "around")(prediction)
        if not as_json:
            Console().print(around_table(answer))
    if as_json:
        _print_json(answer)
    return 0


def _only_predicted(error: ProbeError, found: Any, as_json: bool) -> int:
    """Nothing can be measured for the card here: say so, and what is expected on it."""
    if as_json:
        told = {"message": error.message, "remedy": error.remedy}
        predicted = found and {"config": dict(found.estimate.config), "estimate": found.to_dict()}
        _print_json({"schema": 1, "best": None, "predicted": predicted, "error": told})
    else:
        Console(stderr=True, soft_wrap=True).print(f"autofit: {error}", markup=False, highlight=False)
        said = "expected to be the fastest that fits, not measured:" if found else "no config is expected to fit."
        Console().print(said, highlight=False)
        if found is not None:
            Console().print(estimate_table(found.to_dict()))
    return error.exit_code


@app.command()
def train(
    context: typer.Context,
    result: Annotated[Path, typer.Argument(metavar="RESULT.yaml")],
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
    seed: int = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code.")] = False,
) -> int:
    """Train the config of a result on a file."""
    if from_scratch == (weights is not None):
        raise InputError("say what to start from.", "Give either --weights DIR or --from-scratch.")
    if weights is not None and not Path(weights).is_dir() and not is_hub_id(weights):
        raise InputError(f"the directory {weights} is not there.", "Check --weights.")
    stderr = Console(stderr=True)
    options = _heavy("autofit.train", "TrainOptions")(
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
        trained = _heavy("autofit.train", "train_saved")(
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


@app.command()
def export(
    result: Annotated[Path | None, typer.Argument(metavar="RESULT.yaml")] = None,
    to: Annotated[str, typer.Option(metavar="TOOL", help="Such as axolotl; list: all of them.")] = "list",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; default: stdout.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where the tool would run another config.")] = False,
    tool_version: Annotated[str | None, typer.Option(metavar="V", help="Of the tool; default: the newest.")] = None,
    as_json: Json = False,
) -> int:
    """Write the config of a result for another training tool."""
    if to == "list":
        return _listed("tools", describe_tools(), tools_table, as_json)
    if result is None:
        raise InputError("there is nothing to export.", "Give a RESULT.yaml.")
    made = _heavy("autofit.exports", "export")(result, to=to, output=output, strict=strict, tool_version=tool_version)
    if as_json:
        _print_json(made.to_json())
    else:
        print("" if output else made.text, end="")
        Console(stderr=True, soft_wrap=True).print(made.told, end="", markup=False, highlight=False)
    return 0


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR [RUN_DIR]", help="A run; two are compared.")],
    form: Annotated[
        str | None, typer.Option("--format", help="html, svg, png or md; of two runs a table, or md.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: in RUN_DIR; md: stdout.")] = None,
) -> int:
    """Write the report of a search again, its pictures or a summary; or tell two searches apart."""
    told = _heavy("autofit.report.run_report", "report")(runs, form, output)
    print(told) if isinstance(told, str) else Console().print(told)
    return 0


@app.command()
def doctor(
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: CUDA where there is a card.")] = None,
    clear_store: Annotated[bool, typer.Option("--clear-store", help="Forget what searches have measured.")] = False,
    as_json: Json = False,
) -> int:
    """What this machine offers: device, budget, and which techniques are available."""
    shown: Callable[[Any], Any] = cleared_text if clear_store else doctor_table
    data = _heavy("autofit.doctor", "clear_store")() if clear_store else _heavy("autofit.doctor", "examine")(device)
    _print_json(data) if as_json else Console().print(shown(data), soft_wrap=clear_store, markup=False)
    return 0


@app.command()
def models(as_json: Json = False) -> int:
    """The models known by name."""
    return _listed("models", describe_presets(), models_table, as_json)


@app.command()
def spaces(as_json: Json = False) -> int:
    """The search spaces that ship with autofit, and how many configs each holds."""
    data = _heavy("autofit.spaces", "describe_spaces")()
    _print_json(data) if as_json else Console().print(spaces_table(data["spaces"], data["counted_for"]))
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    set_defaults()  # before a command loads torch
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    sys.exit(_run(lambda: app(arguments, prog_name="autofit", standalone_mode=False, obj=arguments), as_json))


def _run(command: Callable[[], Any], as_json: bool) -> int:
    """The exit code of a command, with every error told as one sentence (or one JSON object)."""
    try:
        return int(command() or 0)
    except AutofitError as error:
        _tell(error.message, error.remedy, as_json)
        return error.exit_code
    except UsageError as error:
        message = getattr(error, "format_message", lambda: "")()
        if message:
            _tell(message, "See --help.", as_json)
        else:  # no arguments at all: the error is the help text
            getattr(error, "show", lambda: None)()
        return InputError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _tell("interrupted.", "", as_json)
        return INTERRUPTED
    except Exception as error:
        if as_json:  # on every exit; the traceback, which somebody has to see, follows on stderr
            message = f"autofit failed: {type(error).__name__}: {error}"
            _print_json({"schema": 1, "error": {"message": message, "remedy": "Please report it."}})
        raise


def _tell(message: str, remedy: str, as_json: bool) -> None:
    if as_json:
        _print_json({"schema": 1, "error": {"message": message, "remedy": remedy}})
    Console(stderr=True, soft_wrap=True).print(f"autofit: {message} {remedy}".strip(), markup=False, highlight=False)


def _heavy(module: str, name: str) -> Any:
    """What a command needs of a room that loads torch or optuna."""
    return getattr(importlib.import_module(module), name)


def _listed(name: str, rows: list[dict[str, Any]], table: Callable[..., Any], as_json: bool) -> int:
    _print_json({"schema": 1, name: rows}) if as_json else Console().print(table(rows))
    return 0


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data))
