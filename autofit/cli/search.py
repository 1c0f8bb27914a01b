"""`autofit search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autofit.cli.estimate import print_expected
from autofit.cli.options import (
    Device,
    EffectiveBatch,
    GpuMem,
    Json,
    Mem,
    MemorySnapshot,
    Model,
    Quiet,
    SeqLen,
    TrustRemoteCode,
)
from autofit.cli.output import INTERRUPTED, heavy, print_json
from autofit.core.errors import InputError, NothingFitsError, ProbeError
from autofit.core.options import parse_settings, seconds_of
from autofit.report import LiveDisplay, nothing_fits_view, result_table


def search(
    model: Model,
    gpu_mem: GpuMem = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="The card to fit, such as rtx-4090.")] = None,
    device: Device = None,
    mem: Mem = None,
    host_mem: Annotated[str | None, typer.Option(metavar="GIB", help="Host memory; default 80 % of free.")] = None,
    margin: Annotated[float, typer.Option(help="Fraction of the card kept free.")] = 0.05,
    seq_len: SeqLen = None,
    effective_batch: EffectiveBatch = None,
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
    memory_snapshot: MemorySnapshot = False,
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the answer as Markdown.")] = False,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Find, prove and write down the fastest config that fits."""
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
    try:
        with LiveDisplay(stderr, quiet=quiet) as listener:
            result = heavy("autofit.fit", "search")(model, listener=listener, **here, **about)
    except ProbeError as error:
        if gpu_mem is None and gpu is None:
            raise
        expected = heavy("autofit.predict", "expected_best")(model, **about)
        return print_expected(error, expected, as_json=as_json, as_markdown=as_markdown)
    if as_json:
        print_json(result.to_json())
    elif as_markdown and result.run_directory:
        print(heavy("autofit.report.run_report", "report")([Path(result.run_directory)], "md", None))
    elif result.best is not None:
        Console().print(result_table(result, tolerance=tolerance), crop=False)  # commands are to be copied whole
    if result.stopped_by == "interrupt":
        told = f"interrupted; go on with --resume --out {result.run_directory}"
        stderr.print(told, markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED
    if result.best is None:
        stderr.print(nothing_fits_view(result))
        return NothingFitsError.exit_code
    return 0
