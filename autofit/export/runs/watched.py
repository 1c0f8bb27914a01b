"""A command of a tool, run in an environment of its own while its optimizer steps are watched."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.environment import SETTINGS

# `watch/sitecustomize.py`, which the tool's Python finds first.
_WATCH = Path(__file__).parents[2] / "hardware" / "watch"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}
# As in a search, threads that wait do not spin: beside busy processes a step of transformers took
# three times as long with those that do.
_WAITING = {"OMP_WAIT_POLICY": SETTINGS["OMP_WAIT_POLICY"]}


@dataclass(frozen=True)
class Watch:
    """What is watched.

    Attributes:
        device: "cpu" or "cuda".
        cap: the bytes that may be used; None: all.
        tracked: the steps whose bytes are counted on a CPU; None: all.
        last: the step that ends the process; None: when its own work is done.
        compiles: whether its steps do, which are then counted together.
    """

    device: str = "cpu"
    cap: int | None = None
    tracked: int | None = None
    last: int | None = None
    compiles: bool = False

    def variables(self, folder: Path) -> dict[str, str]:
        """What the process is told."""
        numbers = {
            "WATCHED_CAP": self.cap,
            "WATCHED_TRACKED": self.tracked,
            "WATCHED_LAST": self.last,
        }
        found = {"WATCHED_STEPS": str(folder), "WATCHED_DEVICE": self.device}
        for name, number in numbers.items():
            if number is not None:
                found[name] = str(number)

        if self.compiles and self.device == "cpu":
            found["WATCHED_COMPILES"] = "1"

        return found


@dataclass(frozen=True)
class Watched:
    """What became of a command.

    Attributes:
        code: its exit code; None: it did not end in time.
        ranks: the optimizer steps of each of its processes that had some.
        out_of_memory: whether one of them ended for want of memory.
        said: all that it wrote.
    """

    code: int | None
    ranks: tuple[tuple[Mapping[str, Any], ...], ...]
    out_of_memory: bool
    said: str = field(repr=False)


def run_watched(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    *,
    watch: Watch,
    seconds: float,
) -> Watched:
    """Run a command in a folder, and end it and what it started after some seconds.

    Args:
        variables: of its environment, besides those of this process.

    Raises:
        OSError: there is no such program.
    """
    steps = folder / "steps"
    steps.mkdir()
    environment = {
        **_WAITING,
        **os.environ,
        **_OFFLINE,
        **variables,
        **watch.variables(steps),
    }
    paths = [str(_WATCH), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["HF_DATASETS_CACHE"] = str(folder / "datasets")
    if watch.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""

    log = folder / "said.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)

    ranks = []
    lacked = False
    for path in sorted(steps.iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lacked = lacked or any("out_of_memory" in line for line in lines)
        ranks.append(tuple(line for line in lines if "out_of_memory" not in line))

    return Watched(
        code=code,
        ranks=tuple(rank for rank in ranks if rank),
        out_of_memory=lacked,
        said=log.read_text(errors="replace"),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which is in a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
