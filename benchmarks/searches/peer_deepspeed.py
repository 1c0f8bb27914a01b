"""DeepSpeed's autotuner within a budget: it starts a process for each of its experiments, all on this one machine.

It is told how much memory the machine has, and plans by that; its experiments run `train` below, in which what goes
beyond fails as in `benchmarks.peer_tools`. It wants to clean up other machines by `pdsh`, which nothing needs here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.peer_tools import LR, Found, Rows, SmallMachine, loss_of
from benchmarks.record_table import workload_named

SECONDS = 900.0
PACKAGES = ("deepspeed", "tabulate")
_ROOT = Path(__file__).resolve().parents[2]
_MACHINE = "--machine"
_WATCHED = 2  # steps: the later ones, which it times, are spared the counting, as in a probe
_BUCKET = 1_000_000  # elements: its profile allocates one of them, and the default of 5e8 is more than the machine
_EXPERIMENT = re.compile(r"_tmbspg(\d+)$")  # its names of them end in the micro-batch


def autotune(name: str, effective_batch_size: int, nbytes: int) -> Found:
    """Let it choose the micro-batch of a workload up to that batch, within so many bytes of tensors."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "ds.json").write_text(json.dumps(settings(effective_batch_size)))
        stub = directory / "pdsh"
        stub.write_text("#!/bin/sh\n")
        stub.chmod(0o755)
        start = time.monotonic()
        said = _launch(directory, name, nbytes)
        return found(directory / "autotuning_results", said, time.monotonic() - start)


def settings(effective_batch_size: int) -> dict[str, Any]:
    """Its configuration: AdamW in fp32 on one device, and otherwise what it does by itself."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": _BUCKET},
        "autotuning": {"enabled": True, "max_train_batch_size": effective_batch_size},
    }


def _launch(directory: Path, name: str, nbytes: int) -> str:
    """Run it to its end, or to the end of its time; returns what it printed."""
    script = str(Path(__file__).resolve())
    command = [
        sys.executable,
        script,
        _MACHINE,
        str(nbytes),
        "--autotuning",
        "tune",
        "--num_gpus",
        "1",
        script,
    ]
    command += [
        "--workload",
        name,
        "--bytes",
        str(nbytes),
        "--deepspeed",
        "--deepspeed_config",
        "ds.json",
    ]
    path = os.pathsep.join(
        [str(directory), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    # A line with the word `error` in it makes an experiment a failure, and torch's warnings speak of future errors.
    environment = {**os.environ, "PATH": path, "PYTHONPATH": _import_path(), "TORCH_LOGS": "-all"}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return (directory / "log").read_text(errors="replace")


def _import_path() -> str:
    return os.pathsep.join([str(_ROOT), *(path for path in sys.path if path)])


def found(results: Path, said: str, seconds: float) -> Found:
    """What its results say: the experiments in their order, those that memory ended, and the optimal configuration."""
    described = [json.loads(path.read_text()) for path in results.glob("*/exp.json")]
    experiments = sorted(described, key=lambda each: each["exp_id"])
    sizes = [int(match[1]) for each in experiments if (match := _EXPERIMENT.search(each["name"]))]
    refused = sum(
        "can't allocate memory" in path.read_text() for path in results.glob("*_tmbspg*/stderr.log")
    )
    optimal = results / "ds_config_optimal.json"
    size = (
        json.loads(optimal.read_text())["train_micro_batch_size_per_gpu"]
        if optimal.exists()
        else None
    )
    reason = None if size else _reason(said, seconds)
    if size and not any(results.glob(f"*_tmbspg{size}/metrics.json")):
        size, reason = (
            None,
            f"it calls micro-batch {size} optimal, of which no experiment ended well",
        )
    return Found(size, tuple(sizes), refused, seconds, reason)


def _reason(said: str, seconds: float) -> str:
    """Why there is no answer, in its own words."""
    if seconds >= SECONDS:
        return f"it did not end within {SECONDS:.0f} s"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "not run" in line or "Error" in line] or lines[-1:]
    return re.sub(r"^(\[[^]]*\] ?)+", "", telling[-1]) if telling else "it said nothing"


def launch(nbytes: int, arguments: Sequence[str]) -> None:
    """Its launcher, on a machine that has so many bytes."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.launcher import runner

    type(get_accelerator()).total_memory = lambda *_: nbytes
    runner.main(list(arguments))


def train(arguments: Sequence[str]) -> None:
    """What an experiment runs: the training script as its users write it, until it says that this is enough."""
    import deepspeed

    parser = argparse.ArgumentParser()
    parser.add_argument("--workload")
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--local_rank", type=int)
    given = deepspeed.add_config_arguments(parser).parse_args(arguments)
    workload = workload_named(given.workload)
    machine = SmallMachine(given.bytes)
    with machine:
        model = workload.model()
        engine = deepspeed.initialize(args=given, model=model, model_parameters=model.parameters())[
            0
        ]
        batches = iter(
            DataLoader(Rows(workload), batch_size=engine.train_micro_batch_size_per_gpu())
        )

        def step() -> None:
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(loss_of(workload, engine, next(batches)))
                engine.step()

        for _ in range(_WATCHED):
            step()
    while True:
        step()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if sys.argv[1] == _MACHINE:
        launch(int(sys.argv[2]), sys.argv[3:])
    else:
        train(sys.argv[1:])
