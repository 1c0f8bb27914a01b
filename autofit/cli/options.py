"""Options that mean the same in several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Model = Annotated[
    str, typer.Option("--model", help="A preset, a directory with config.json, a hub id, or file.py:function.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code.")]
GpuMem = Annotated[str | None, typer.Option(metavar="GIB", help="Memory of the card to fit.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: CUDA where there is a card.")]
Mem = Annotated[str | None, typer.Option(metavar="GIB", help="Memory for tensors on the CPU.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens of a sample; default 2048 or the model's most.")]
EffectiveBatch = Annotated[int | None, typer.Option(help="Samples per optimizer step; default 32.")]
Result = Annotated[Path, typer.Argument(metavar="RESULT.yaml")]
MemorySnapshot = Annotated[
    bool,
    typer.Option(
        "--memory-snapshot", help="Keep a profiler trace of a step, and on CUDA a snapshot of the memory it took."
    ),
]
