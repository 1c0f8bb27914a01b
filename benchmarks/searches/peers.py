"""autofit's search against the tools that people use to fit training into memory, for real, in the same memory.

`OMP_NUM_THREADS=1 python -m benchmarks.peers [--workload NAME ...] [--budget NAME ...] [--tool NAME ...] [--rounds N]`

Every tool answers a workload and a budget by its own functions at their defaults (`benchmarks.peer_tools`), autofit by
`autofit.search` in two spaces, `full`, and `exact`, in which all learn the same up to rounding, and in the first also
by a quick search, `fast`. What a tool found is run at equal work: a micro-batch that divides the effective batch, with
accumulation up to it. All answers are then probed in turn, round by round, in fresh processes; no tool's own loop
counts against it. A ratio is the median over the rounds. Figures are kept in the file as they come: what is measured
anew takes the place of what was there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import autofit
from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.environment import versions
from autofit.core.errors import ProbeError
from autofit.core.files import write_atomically
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.probe import LocalExecutor, Plan, Request
from autofit.report.formatting import OUTCOMES, describe, number
from benchmarks import peer_deepspeed, peer_tools
from benchmarks.peer_tools import Found
from benchmarks.rank_tables import TABLES
from benchmarks.record_table import Table, workload_named

RESULTS = Path(__file__).parents[1] / "results" / "peers-cpu.json"
WORKLOADS = ("tiny-llama", "gpt2", "bert", "cnn")
FAST = "fast"  # the space `full` by a quick search
SPACES = ("full", "exact", FAST)
DEEPSPEED = "deepspeed"
TOOLS = (*peer_tools.TOOLS, DEEPSPEED)
PACKAGES = {
    **{tool: (name,) for tool, name in peer_tools.PACKAGES.items()},
    DEEPSPEED: peer_deepspeed.PACKAGES,
}
BUDGETS = {
    "tight": "half of the recorded table's configs fit",
    "medium": "halfway between what plain training takes with a quarter and with half of the batch",
    "ample": "a quarter more than plain training takes with the whole batch",
}
AMPLE = 1.25
TOOL_SECONDS = 600.0
# whole steps, as a search verifies
PLAN = Plan(min_steps=5, max_steps=50, max_seconds=5.0, compose=False)


@dataclass
class Answer:
    """What one tool found: the config that it amounts to, or None and why; what it tried, how often in vain, and how
    long that took; the samples per second of every round."""

    tool: str
    config: Config | None
    tried: int
    out_of_memory: int
    seconds: float
    reason: str | None = None
    batch_size: int | None = None
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rates)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "config": dict(self.config) if self.config else None}


@dataclass(frozen=True)
class Problem:
    """A workload and so many bytes for its tensors on this machine."""

    name: str
    budget: str
    nbytes: int
    workload: Workload
    hardware: Hardware


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, measure, print and write down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", nargs="*", choices=WORKLOADS, default=WORKLOADS, metavar="NAME"
    )
    parser.add_argument(
        "--budget", nargs="*", choices=list(BUDGETS), default=list(BUDGETS), metavar="NAME"
    )
    parser.add_argument("--tool", nargs="*", choices=TOOLS, default=TOOLS, metavar="NAME")
    parser.add_argument(
        "--search", nargs="*", choices=SPACES, default=SPACES, metavar="NAME", help="of autofit"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as they are written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    tools = [tool for tool in given.tool if not missing(tool)]
    for note in {note for tool in given.tool if (note := missing(tool))}:
        print(note)
    with tempfile.TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        for name in given.workload:
            for problem in problems(executor, name, given.budget):
                row = measured(executor, problem, tools, given.rounds, given.search)
                keep(given.out, about(problem.hardware), row)
                print(json.dumps(row) if given.json else report(row), flush=True)
    if not given.json:
        print("\n" + summary(json.loads(given.out.read_text())["problems"]))


def missing(tool: str) -> str | None:
    """What to install for a tool to take part, where something is missing."""
    absent = [name for name in PACKAGES.get(tool, ()) if not find_spec(name)]
    if not absent:
        return None
    return f"{tool} takes no part: pip install {' '.join(absent)} beside this torch (--no-deps keeps it as it is)."


def about(hardware: Hardware) -> dict[str, Any]:
    """What figures must share to stand in one file."""
    packages = {name: _version(name) for name in ("accelerate", "lightning", "deepspeed")}
    return {
        "machine": hardware.name,
        "cores": hardware.cores,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": {**versions(), **packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problems(executor: LocalExecutor, name: str, budgets: Sequence[str]) -> list[Problem]:
    """A workload at the budgets asked for, whose bytes follow from what was recorded of it."""
    workload = workload_named(name)
    hardware, traits = executor.inspect(workload, "cpu", None)
    looked = dataclasses.replace(workload, traits=traits)
    table = Table.read(TABLES / f"{name}.json")
    peaks = {
        row.config: row.peak_bytes for row in table.rows if row.step_seconds and row.peak_bytes
    }
    batch = workload.effective_batch_size
    plain = {
        size: peaks[plain_config(looked, hardware, size)]
        for size in (batch // 4, batch // 2, batch)
    }
    nbytes = budget_bytes(list(peaks.values()), plain)
    return [Problem(name, budget, nbytes[budget], looked, hardware) for budget in budgets]


def plain_config(workload: Workload, hardware: Hardware, batch_size: int) -> Config:
    """Plain training in fp32 with the micro-batch that a batch size amounts to at the effective batch."""
    micro = micro_batch(batch_size, workload.effective_batch_size)
    return techniques.canonicalize({"micro_batch_size": micro}, workload, hardware)


def micro_batch(batch_size: int, effective_batch_size: int) -> int:
    """The largest divisor of the effective batch that is no more than a batch size."""
    fitting = range(1, min(batch_size, effective_batch_size) + 1)
    return max(size for size in fitting if effective_batch_size % size == 0)


def budget_bytes(peaks: Sequence[int], plain: Mapping[int, int]) -> dict[str, int]:
    """The bytes of every budget, from the peaks of all configs and of plain training by micro-batch."""
    quarter, half, whole = (plain[size] for size in sorted(plain))
    return {
        "tight": int(statistics.median(peaks)),
        "medium": (quarter + half) // 2,
        "ample": int(AMPLE * whole),
    }


def measured(
    executor: LocalExecutor,
    problem: Problem,
    tools: Sequence[str],
    rounds: int,
    searches: Sequence[str] = SPACES,
) -> dict[str, Any]:
    """Every tool's answer to a problem, and how fast it runs."""
    load = [os.getloadavg()[0]]
    answers = [found_by_autofit(problem, space) for space in searches]
    answers += [found_by_peer(executor, problem, tool) for tool in tools]
    budget = Budget(device_bytes=problem.nbytes, host_bytes=problem.hardware.host_free_bytes)

    def measure(config: Config) -> Measurement:
        return executor.measure(
            problem.workload, Request(config, problem.hardware, budget, PLAN), number=0
        )

    time_in_turn(answers, measure, rounds)
    return {
        "workload": problem.name,
        "budget": problem.budget,
        "budget_gib": problem.nbytes / GIB,
        "effective_batch_size": problem.workload.effective_batch_size,
        "load": [*load, os.getloadavg()[0]],
        "answers": [answer.to_dict() for answer in answers],
        "ratios": ratios(answers),
    }


def found_by_autofit(problem: Problem, space: str) -> Answer:
    """The answer of a search with default options, which finds nothing in any cache."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
    ):
        out = Path(folder) / "run"
        how: dict[str, Any] = {"space": "full", "fast": True} if space == FAST else {"space": space}
        result = autofit.search(
            problem.workload, device="cpu", mem=problem.nbytes / GIB, out=out, **how
        )
    refused = sum(trial.outcome is Outcome.OUT_OF_MEMORY for trial in result.trials)
    reason = None if result.best else "nothing fits"
    config = result.best.config if result.best else None
    return Answer(space, config, len(result.trials), refused, result.search_seconds, reason)


def found_by_peer(executor: LocalExecutor, problem: Problem, tool: str) -> Answer:
    """What a tool settles for, in a process of its own."""
    workload, nbytes, begun = problem.workload, problem.nbytes, time.perf_counter()
    try:
        if tool == DEEPSPEED:
            found = peer_deepspeed.autotune(problem.name, workload.effective_batch_size, nbytes)
        else:
            settle = peer_tools.settle_for
            found = executor.run(
                settle, workload, tool, nbytes, log=f"{tool}.log", timeout=TOOL_SECONDS
            )
    except ProbeError as error:
        found = Found(None, (), 0, time.perf_counter() - begun, str(error))
    size = found.batch_size
    config = plain_config(workload, problem.hardware, size) if size else None
    return Answer(
        tool, config, len(found.tried), found.out_of_memory, found.seconds, found.reason, size
    )


def time_in_turn(
    answers: Sequence[Answer], measure: Callable[[Config], Measurement], rounds: int
) -> None:
    """Probe all that is to run, one after the other, the first one last in the next round; the same config once."""
    configs = list(dict.fromkeys(answer.config for answer in answers if answer.config))
    for _ in range(rounds):
        for config in configs:
            same = [answer for answer in answers if answer.config == config]
            seen = measure(config) if same else None
            for answer in same:
                if seen and seen.fits:
                    answer.rates.append(seen.throughput)
                elif seen:
                    answer.config, answer.reason = (
                        None,
                        f"at the effective batch it ends: {OUTCOMES[seen.outcome]}",
                    )
        configs = configs[1:] + configs[:1]


def ratios(answers: Sequence[Answer]) -> dict[str, dict[str, dict[str, float]]]:
    """By autofit's space and by tool, its throughput over the tool's: the rounds' median, lowest and highest."""
    ours = [answer for answer in answers if answer.tool in SPACES and answer.config]
    theirs = [answer for answer in answers if answer.tool not in SPACES and answer.config]
    return {our.tool: {their.tool: _ratio(our, their) for their in theirs} for our in ours}


def _ratio(ours: Answer, theirs: Answer) -> dict[str, float]:
    by_round = [a / b for a, b in zip(ours.rates, theirs.rates, strict=True)]
    return {"median": statistics.median(by_round), "low": min(by_round), "high": max(by_round)}


def keep(path: Path, shared: dict[str, Any], row: dict[str, Any]) -> None:
    """Write a row in the place of the one for the same workload and budget; none of other versions stays beside it."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = kept["problems"] if kept.get("about") == shared else []
    others = [each for each in rows if _key(each) != _key(row)]
    order = [(name, budget) for name in WORKLOADS for budget in BUDGETS]
    together = sorted([*others, row], key=lambda each: order.index(_key(each)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"about": shared, "problems": together}, indent=1) + "\n")


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["workload"], row["budget"]


def report(row: Mapping[str, Any]) -> str:
    """One problem: a line for each answer, those of others with autofit's throughput over theirs."""
    head = f"{row['workload']} within {row['budget_gib']:.3f} GiB ({row['budget']}: {BUDGETS[row['budget']]})"
    return "\n".join([head, *(_line(answer, row["ratios"]) for answer in row["answers"])])


def _line(answer: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    name = f"autofit, {answer['tool']}" if answer["tool"] in SPACES else answer["tool"]
    spent = f"{answer['tried']:2d} tried, {answer['out_of_memory']:2d} out of memory, {answer['seconds']:4.0f} s"
    if not answer["config"]:
        said = f"says {answer['batch_size']}, but" if answer["batch_size"] else "fits nothing:"
        return f"  {name:20s} {spent} | {said} {answer['reason']}"
    rate = f"{number(statistics.median(answer['rates']))} samples/s"
    compared = [
        f"{space} {_words(of[answer['tool']])}"
        for space, of in found.items()
        if answer["tool"] in of
    ]
    against = f" | {', '.join(compared)}" if compared else ""
    return f"  {name:20s} {spent} | {rate:>14s}: {describe(answer['config'])}{against}"


def _words(ratio: Mapping[str, float]) -> str:
    if ratio["low"] == ratio["high"] == 1.0:
        return "the same"
    return f"x {ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """autofit over the fastest of the others, problem by problem."""
    lines = ["throughput of autofit over that of the fastest of the others"]
    for row in rows:
        rates = {
            each["tool"]: statistics.median(each["rates"])
            for each in row["answers"]
            if each["config"]
        }
        others = [tool for tool in rates if tool not in SPACES]
        best = max(others, key=lambda tool: rates[tool], default=None)
        told = (
            [f"{space} {_words(of[best])}" for space, of in row["ratios"].items()] if best else []
        )
        ending = (
            f"{', '.join(told)} ({best})" if best else "none of the others finds anything that fits"
        )
        lines.append(
            f"  {row['workload']:11s} {row['budget']:7s} {row['budget_gib']:.3f} GiB  {ending}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
