"""What a quick search costs beside the batch-size finders: the seconds of whole commands, imports included, by turns.

`python -m benchmarks.whole_commands [--workload NAME ...] [--budget NAME ...] [--tool NAME ...] [--rounds N]`

Each command is a process of its own with one thread and empty caches: `autofit search --fast`, and a script that
imports what a finder's user does and calls the finder (`benchmarks.peer_tools`). What they find is compared by
`benchmarks.peers`. A finder that ends with an error of its own counts until then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit.core.files import write_atomically
from autofit.core.hardware import GIB
from autofit.probe import LocalExecutor
from benchmarks import peer_tools
from benchmarks.memory_models import MODELS, Case
from benchmarks.peers import BUDGETS, WORKLOADS, about, missing, problems

RESULTS = Path(__file__).parents[1] / "results" / "whole_commands.json"
AUTOFIT = "autofit search --fast"
_ROOT = Path(__file__).parents[2]
_FINDER = (
    "import sys; from benchmarks.memory_models import MODELS; from benchmarks.peer_tools import settle_for; "
    "name, tool, nbytes = sys.argv[1:]; settle_for(MODELS[name].workload(name), tool, int(nbytes))"
)
_FUNCTION = (
    "from benchmarks.memory_models import MODELS\n\n\ndef "
    "workload():\n    return MODELS[{name!r}].workload({name!r})\n"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the commands by turns, print a line for each problem and write the figures down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", nargs="*", choices=WORKLOADS, default=WORKLOADS, metavar="NAME"
    )
    parser.add_argument(
        "--budget", nargs="*", choices=list(BUDGETS), default=list(BUDGETS), metavar="NAME"
    )
    tools = list(peer_tools.TOOLS)
    parser.add_argument("--tool", nargs="*", choices=tools, default=tools, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    for note in {note for tool in given.tool if (note := missing(tool))}:
        print(note)
    rows: list[dict[str, Any]] = []
    with LocalExecutor() as executor:
        asked = [each for name in given.workload for each in problems(executor, name, given.budget)]
    for problem in asked:
        commands = {AUTOFIT: autofit_command(problem.name, problem.nbytes)}
        commands |= {
            tool: finder_command(problem.name, tool, problem.nbytes)
            for tool in given.tool
            if not missing(tool)
        }
        seconds = by_turns(commands, given.rounds)
        rows.append({"workload": problem.name, "budget": problem.budget, "seconds": seconds})
        print(line(rows[-1]), flush=True)
    machine = about(asked[0].hardware) | {"threads": 1}  # of each command
    write_atomically(given.out, json.dumps({"about": machine, "problems": rows}, indent=1) + "\n")


def autofit_command(name: str, nbytes: int) -> list[str]:
    """The search of a model, whose files lie in the current folder."""
    case = MODELS[name]
    model = ["--model", f"{name}.py:workload"]
    if case.task != "convolutions":
        sizes = {
            "--task": case.task,
            "--seq-len": case.sequence_length,
            "--effective-batch": case.effective_batch_size,
        }
        model = ["--model", f"./{name}", *(str(word) for pair in sizes.items() for word in pair)]
    where = [
        "--device",
        "cpu",
        "--mem",
        repr(nbytes / GIB),
        "--space",
        "full",
        "--fast",
        "--out",
        "run",
    ]
    return [sys.executable, "-m", "autofit", "search", *model, *where]


def finder_command(name: str, tool: str, nbytes: int) -> list[str]:
    """A script that lets a finder choose."""
    return [sys.executable, "-c", _FINDER, name, tool, str(nbytes)]


def by_turns(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each command, one after the other in each round."""
    seconds: dict[str, list[float]] = {each: [] for each in commands}
    for _ in range(rounds):
        for each, command in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds[each].append(seconds_of(command, Path(folder)))
    return seconds


def seconds_of(command: Sequence[str], folder: Path) -> float:
    """How long a command takes in a folder with the models. Raises SystemExit where autofit fails."""
    for name, case in MODELS.items():
        _write(folder, name, case)
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    taken = time.monotonic() - start
    if done.returncode and "autofit" in command:
        raise SystemExit(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return taken


def _write(folder: Path, name: str, case: Case) -> None:
    if case.task == "convolutions":
        (folder / f"{name}.py").write_text(_FUNCTION.format(name=name), encoding="utf-8")
    else:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(dict(case.config)), encoding="utf-8")


def line(row: Mapping[str, Any]) -> str:
    """The medians of one problem, and how many times those of each finder the search takes."""
    medians = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
    ours = medians.pop(AUTOFIT)
    told = [f"{name} {seconds:.1f} s (x {ours / seconds:.1f})" for name, seconds in medians.items()]
    return f"{row['workload']:11s} {row['budget']:7s} {AUTOFIT} {ours:.1f} s | {', '.join(told)}"


if __name__ == "__main__":
    main()
