"""`autofit tune`."""

import contextlib
from pathlib import Path
from typing import Any

import autofit.cli.options as options
import autofit.cli.tune_options as tune_options
from autofit.cli.output import heavy, print_json
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event
from autofit.core.files import check_readable, check_writable
from autofit.core.interrupts import AsCtrlC
from autofit.core.options import search_options
from autofit.core.zygote_process import TRANSFORMERS, started_early
from autofit.hardware.catalogue import card_to_search_for
from autofit.models import check_searched, check_task
from autofit.report.live import LiveDisplay
from autofit.report.terminal import Terminal
from autofit.report.tuned import gain_lines, in_tool_lines, tuned_lines

_OF_FILE = ("space", "set", "devices")  # of what a search is given, what the file says


def tune(
    file: tune_options.ToolFile,
    model: tune_options.ModelOfFile = None,
    task: options.Task = None,
    seq_len: options.SeqLen = None,
    gpu_mem: options.GpuMem = None,
    gpu: options.Gpu = None,
    device: options.Device = None,
    mem: options.Mem = None,
    host_mem: options.HostMem = None,
    devices: options.TunedDevices = None,
    nodes: options.Nodes = 1,
    link: options.Link = None,
    keep: tune_options.Keep = None,
    free: tune_options.Free = None,
    trials: options.Trials = 40,
    time_limit: options.TimeLimit = None,
    fast: options.Fast = False,
    output: tune_options.TunedOutput = None,
    in_place: tune_options.InPlace = False,
    verify_in_tool: tune_options.VerifyInTool = False,
    tool_python: tune_options.ToolPython = None,
    out: options.Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Tune a file of axolotl, LLaMA-Factory, TRL, ms-swift or kohya for a card; what is learnt stays as it is.

    Examples:
      autofit tune axolotl.yaml --gpu-mem 24
      autofit tune qwen3_lora_sft.yaml --gpu rtx-4090 --in-place
      autofit tune fft-fsdp.yaml --gpu h100 --devices 8
      autofit tune sft.yaml --gpu-mem 16 --keep attn_implementation --output sft16.yaml
      autofit tune sft.yaml --gpu-mem 24 --verify-in-tool --tool-python ~/llamafactory/bin/python
      autofit tune --gpu-mem 24 -- swift sft --model Qwen/Qwen2.5-7B-Instruct --max_length 2048
    """
    checked = search_options(
        gpu_mem=gpu_mem,
        gpu=gpu,
        device=device,
        mem=mem,
        host_mem=host_mem,
        devices=1 if devices is None else devices,
        nodes=nodes,
        link=link,
        trials=trials,
        time_limit=time_limit,
        fast=fast,
        out=out,
    )
    if gpu is not None:
        card_to_search_for(gpu)
    check_task(task)
    check_searched(task)
    is_command = len(file) > 1
    if not is_command:
        check_readable(Path(file[0]), "the file")
    if output is not None and in_place:
        raise InputError("--output and --in-place both say where to write.", "Give one of them.")
    if is_command and in_place:
        raise InputError("a command is in no file to be written over.", "Leave out --in-place.")
    if output is not None:
        check_writable(output, folder=False, remedy="Choose another --output.")

    stderr = Terminal(stderr=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(started_early(TRANSFORMERS))
        display = stack.enter_context(LiveDisplay(stderr, quiet=quiet))

        def listener(event: Event) -> None:
            display(event)

        tune_file = heavy("autofit.api.tune", "tune")
        stack.enter_context(AsCtrlC())
        given = {name: value for name, value in dict(checked).items() if name not in _OF_FILE}
        tuned = tune_file(
            file if is_command else file[0],
            model=model,
            task=task,
            seq_len=seq_len,
            keep=tuple(keep or ()),
            free=tuple(free or ()),
            devices=devices,
            verify_in_tool=verify_in_tool,
            tool_python=tool_python,
            listener=listener,
            **given,
        )

    path: Path | None = None
    if output is not None or (tuned.changes and not is_command):
        path = heavy("autofit.api.tune", "save")(tuned, output, in_place=in_place)
    if as_json:
        print_json({**tuned.to_dict(), "file": path and str(path)})
        return _exit_code(tuned)

    print(tuned.text if is_command else tuned.diff, end="")
    usable = tuned.result.budget.cap_bytes(tuned.result.hardware.device)
    lines = tuned_lines(tuned.before, tuned.after, usable, is_changed=bool(tuned.changes))
    if tuned.in_tool is not None:
        lines += in_tool_lines(**tuned.in_tool.figures())
    lines += gain_lines((gain.keys, gain.speed) for gain in tuned.gains)
    lines += tuned.notes
    if path is not None:
        lines.append(f"Written to {path}.")
    if tuned.result.run_directory is not None:
        lines.append(f"All that the search saw is in {tuned.result.run_directory}.")
    for line in lines:
        stderr.print(line, markup=False, highlight=False, soft_wrap=True)
    return _exit_code(tuned)


def _exit_code(tuned: Any) -> int:
    """0, but for a file that its own tool could not train from."""
    failed = tuned.in_tool is not None and tuned.in_tool.failed
    return ProbeError.exit_code if failed else 0
