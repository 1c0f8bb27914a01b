"""`autofit search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from autofit.cli.options import (
    Device,
    EffectiveBatch,
    Gpu,
    GpuMem,
    HostMem,
    Json,
    Margin,
    Markdown,
    Mem,
    MemorySnapshot,
    Model,
    Narrow,
    NoStore,
    Out,
    Quiet,
    ResumeSearch,
    Seed,
    SeqLen,
    Space,
    TimeLimit,
    Tolerance,
    Trials,
    TrustRemoteCode,
    Workers,
)
from autofit.cli.output import INTERRUPTED, heavy, print_json
from autofit.core.errors import InputError, NothingFitsError, ProbeError
from autofit.core.events import Event, Note
from autofit.core.options import SearchOptions, parse_settings, search_options, seconds_of
from autofit.core.result import Result
from autofit.hardware.catalogue import card_to_search_for
from autofit.hardware.driver import no_gpu_note, why_no_gpu
from autofit.report import LiveDisplay, nothing_fits_view, predicted_view, result_table

_OF_MODELS = ("seq_len", "effective_batch", "trust_remote_code")
_REMEDY = "Run on a machine with the card to measure, or search for the CPU with --device cpu --mem GIB."


def search(
    model: Model,
    seq_len: SeqLen = None,
    effective_batch: EffectiveBatch = None,
    trust_remote_code: TrustRemoteCode = False,
    gpu_mem: GpuMem = None,
    gpu: Gpu = None,
    device: Device = None,
    mem: Mem = None,
    host_mem: HostMem = None,
    margin: Margin = 0.05,
    space: Space = None,
    set_: Narrow = None,
    trials: Trials = 40,
    time_limit: TimeLimit = None,
    tolerance: Tolerance = 0.03,
    seed: Seed = 0,
    workers: Workers = None,
    resume: ResumeSearch = False,
    no_store: NoStore = False,
    out: Out = None,
    memory_snapshot: MemorySnapshot = False,
    as_json: Json = False,
    as_markdown: Markdown = False,
    quiet: Quiet = False,
) -> int:
    """Find, prove and write down the fastest config that fits.

    Examples:
      autofit search --model llama-3.1-8b --gpu-mem 24
      autofit search --model tiny-llama --device cpu --mem 2 --trials 8
      autofit search --model train.py:workload --set precision=bf16,fp32
    """
    if as_json and as_markdown:
        raise InputError("--json and --markdown both say what is printed.", "Give one of them.")
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
    here = {
        "time_limit": limit,
        "workers": workers,
        "out": out,
        "resume": resume,
        "store": not no_store,
        "memory_snapshot": memory_snapshot,
    }
    note = _no_gpu(search_options(**here, **{name: each for name, each in about.items() if name not in _OF_MODELS}))
    with LiveDisplay(stderr, quiet=quiet) as listener:
        if note:
            listener(note)  # before the imports, which take seconds

        def hear(event: Event) -> None:
            if event != note:
                listener(event)

        result = heavy("autofit.api.fit", "search")(model, listener=hear, **here, **about)
    if as_json:
        print_json(_as_json(result))
    elif as_markdown and result.run_directory:
        print(heavy("autofit.report.run_report", "report")([Path(result.run_directory)], "md", None))
    elif result.predicted_best is not None:
        Console().print(predicted_view(result, result.predicted_best), crop=False)
    elif result.best is not None:
        Console().print(result_table(result, tolerance=tolerance), crop=False)  # commands are to be copied whole
    if result.stopped_by == "interrupt":
        told = f"interrupted; go on with --resume --out {result.run_directory}"
        stderr.print(told, markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED
    if result.config is None:
        stderr.print(nothing_fits_view(result))
        return NothingFitsError.exit_code
    return 0 if result.best else ProbeError.exit_code


def _no_gpu(options: SearchOptions) -> Note | None:
    """What to say at once where a search for a card can measure nothing."""
    reason = why_no_gpu() if options.names_a_card else None
    if reason and options.gpu:
        card_to_search_for(options.gpu)  # what cannot be searched for is told alone
    return Note(no_gpu_note(reason)) if reason else None


def _as_json(result: Result) -> dict[str, Any]:
    """The object of --json; where all is predicted, the error that is told with exit code 4 as well."""
    if result.predicted_best is None:
        return result.to_json()
    return {**result.to_json(), "error": {"message": result.notes[0], "remedy": _REMEDY}}
