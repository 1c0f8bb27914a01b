"""`autofit search`."""

import contextlib
from pathlib import Path
from typing import Any

import autofit.cli.options as options
from autofit.cli.output import heavy, print_error, print_json
from autofit.core.errors import InputError, NothingFitsError
from autofit.core.events import Event, Note
from autofit.core.files import check_readable
from autofit.core.interrupts import AsCtrlC
from autofit.core.knobs import SETTABLE
from autofit.core.learning import check_judging
from autofit.core.options import loss_options_of, parse_settings, search_options, seconds_of
from autofit.core.quoting import shell_path
from autofit.core.run_directory import RunDirectory
from autofit.core.workload import check_sizes
from autofit.core.zygote_process import PLAIN, TRANSFORMERS, started_early
from autofit.export.tools import tool_named
from autofit.hardware.catalogue import card_to_search_for
from autofit.hardware.driver import no_gpu_note, why_no_gpu
from autofit.models import check_searched, check_task, kind_of, make_importable, names_transformers
from autofit.report.explain import nothing_fits_view
from autofit.report.live import LiveDisplay
from autofit.report.predicted import predicted_view
from autofit.report.table import result_table
from autofit.report.terminal import Terminal


def search(
    model: options.Model,
    task: options.Task = None,
    teacher: options.Teacher = None,
    seq_len: options.SeqLen = None,
    resolution: options.Resolution = None,
    frames: options.Frames = None,
    train_text_encoders: options.TrainTextEncoders = False,
    effective_batch: options.EffectiveBatch = None,
    trust_remote_code: options.TrustRemoteCode = False,
    loss_option: options.LossOption = None,
    gpu_mem: options.GpuMem = None,
    gpu: options.Gpu = None,
    device: options.Device = None,
    mem: options.Mem = None,
    host_mem: options.HostMem = None,
    margin: options.Margin = 0.05,
    space: options.Space = None,
    for_: options.ForTool = None,
    set_: options.Narrow = None,
    trials: options.Trials = 40,
    time_limit: options.TimeLimit = None,
    tolerance: options.Tolerance = 0.03,
    prefer: options.Prefer = "balanced",
    fast: options.Fast = False,
    seed: options.Seed = 0,
    executor: options.Executor = "local",
    workers: options.Workers = None,
    devices: options.Devices = "1",
    nodes: options.Nodes = 1,
    link: options.Link = None,
    judge: options.Judge = None,
    data: options.JudgeData = None,
    weights: options.JudgeWeights = None,
    allow_missing: options.JudgeAllowMissing = False,
    judge_time: options.JudgeTime = None,
    lr: options.JudgeLr = None,
    objective: options.Objective = "throughput",
    resume: options.ResumeSearch = False,
    no_store: options.NoStore = False,
    out: options.Out = None,
    memory_snapshot: options.MemorySnapshot = False,
    as_json: options.Json = False,
    as_markdown: options.Markdown = False,
    quiet: options.Quiet = False,
) -> int:
    """Find, prove and write down the fastest config that fits.

    Examples:
      autofit search --model llama-3.1-8b --gpu-mem 24
      autofit search --model tiny-llama --device cpu --mem 2 --trials 8
      autofit search --model llama-3.1-8b --gpu-mem 24 --for axolotl
      autofit search --model train.py:workload --set precision=bf16,fp32
      autofit search --model llama-3.1-8b --gpu-mem 24 --data data.jsonl --weights ./llama-3.1-8b
      autofit search --model tiny-llama --device cpu --mem 2 --judge loss --data corpus.txt --judge-time 60s
    """
    # What can be told without torch, whose import takes seconds, is told first.
    check_judging(judge, objective, data=data, weights=weights, judge_time=judge_time, lr=lr)
    seconds = seconds_of(judge_time) if judge_time else None
    if as_json and as_markdown:
        raise InputError("--json and --markdown both say what is printed.", "Give one of them.")

    checked = search_options(
        gpu_mem=gpu_mem,
        gpu=gpu,
        device=device,
        mem=mem,
        host_mem=host_mem,
        margin=margin,
        space=space,
        set=parse_settings(set_ or []),
        trials=trials,
        time_limit=time_limit,
        tolerance=tolerance,
        prefer=prefer,
        fast=fast,
        seed=seed,
        executor=executor,
        workers=workers,
        devices=devices,
        nodes=nodes,
        link=link,
        resume=resume,
        store=not no_store,
        out=out,
        memory_snapshot=memory_snapshot,
    )
    loss_options = loss_options_of(loss_option)
    if gpu is not None:
        card_to_search_for(gpu)
    check_task(task)
    check_searched(task)
    if for_ is not None:
        tool_named(for_)
    check_sizes(seq_len, 1 if effective_batch is None else effective_batch)
    if data is not None:
        check_readable(data, "the data file")
    if out is not None:
        RunDirectory(out, resume=resume).check()

    stderr = Terminal(stderr=True)
    with contextlib.ExitStack() as stack:
        is_function = kind_of(model) == "function"
        if executor == "local":
            if is_function:
                make_importable(model)
            needs_transformers = not is_function or names_transformers(model)
            stack.enter_context(started_early(TRANSFORMERS if needs_transformers else PLAIN))

        if not is_function:  # whose module may register knobs
            check_asked = heavy("autofit.search.space", "check_asked")
            check_asked(space, checked.set, tuple(SETTABLE), SETTABLE)

        reason = why_no_gpu() if checked.names_a_card else None
        no_gpu = Note(no_gpu_note(reason)) if reason else None
        display = stack.enter_context(LiveDisplay(stderr, quiet=quiet))
        if no_gpu:
            display(no_gpu)  # before the imports, which take seconds

        def listener(event: Event) -> None:
            if event != no_gpu:
                display(event)

        judging = None
        if judge:
            limits = {"seconds": seconds, "lr": lr}
            judging = heavy("autofit.api.judge", "Judge")(
                data=data,
                weights=weights,
                objective=objective,
                trust_remote_code=trust_remote_code,
                allow_missing=allow_missing,
                **{name: limit for name, limit in limits.items() if limit is not None},
            )
            data = weights = None  # are the judge's

        search_for_result = heavy("autofit.api.search", "search")
        signals = stack.enter_context(AsCtrlC())
        try:
            result = search_for_result(
                model,
                task=task,
                teacher=teacher,
                tool=for_,
                seq_len=seq_len,
                resolution=resolution,
                frames=frames,
                train_text_encoders=train_text_encoders,
                effective_batch=effective_batch,
                trust_remote_code=trust_remote_code,
                loss_options=loss_options,
                listener=listener,
                judge=judging,
                data=data,
                weights=weights,
                **dict(checked),
            )
        except KeyboardInterrupt:  # before there was anything to go on with
            print_error("interrupted.", "", as_json)
            return signals.exit_code

    _print_result(result, as_json, as_markdown, tolerance)
    if result.was_interrupted:
        message = f"interrupted; go on with --resume --out {shell_path(str(result.run_directory))}"
        stderr.print(message, markup=False, highlight=False, soft_wrap=True)
        return signals.exit_code

    if result.config is None:
        stderr.print(nothing_fits_view(result))
        return NothingFitsError.exit_code
    return 0


def _print_result(result: Any, as_json: bool, as_markdown: bool, tolerance: float) -> None:
    """Print the answer to stdout; nothing where there is none and no other form was asked for."""
    if as_json:
        print_json(result.to_json())
    elif as_markdown and result.run_directory:
        report = heavy("autofit.report.run_report", "report")
        print(report([Path(result.run_directory)], "md", None))
    elif result.predicted_best is not None:
        Terminal().print(predicted_view(result, result.predicted_best), crop=False)
    elif result.best is not None:  # commands in the table are to be copied whole
        Terminal().print(result_table(result, tolerance=tolerance), crop=False)
