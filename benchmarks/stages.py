"""The stages of `benchmarks.gpu`: each runs within a number of seconds and returns (outcome, figures).

Outcomes: done, failed, left out (something it needs is missing), timed out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples" / "data" / "alice.txt"
_SPEED = re.compile(r"step (\d+): .* ([\d,]+) tokens/s")

Outcome = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """Where results go, and whether this is the rehearsal on the CPU."""

    directory: Path
    smoke: bool

    @property
    def least_seconds(self) -> float:
        """Less time than this is not worth starting a stage for."""
        return 5.0 if self.smoke else 30.0

    @property
    def run(self) -> Path:
        """The run directory of the search stage."""
        return self.directory / "search"


def correct(bench: Bench, seconds: float) -> Outcome:
    """The tests marked gpu."""
    if importlib.util.find_spec("pytest") is None:
        return "left out", {"missing": "pytest"}
    report = bench.directory / "correct.xml"
    marked = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",  # one process: a GPU is not shared, and its machine may lack the plugin for two
        f"--junitxml={report}",
        "tests",
    ]
    done = _run(marked, min(seconds, 240.0))
    if done is None:
        return "timed out", {}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest writes one test suite"
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    return ("failed" if counts["failures"] + counts["errors"] or not counts["tests"] else "done"), counts


def search(bench: Bench, seconds: float) -> Outcome:
    """A whole search: llama-3.1-8b under a 24 GiB cap, or its rehearsal."""
    wanted = ["--model", "llama-3.1-8b", "--gpu-mem", "24", "--seq-len", "2048", "--effective-batch", "32"]
    if bench.smoke:
        wanted = ["--model", "tiny-llama", "--device", "cpu", "--mem", "1", "--seq-len", "32", "--effective-batch", "4"]
        wanted += ["--trials", "2", "--space", "exact"]
    limit = [
        "--time-limit",
        f"{max(1, int(seconds * 0.8))}s",
        "--out",
        str(bench.run),
        "--json",
        "--quiet",
        "--no-store",
    ]
    resume = ["--resume"] if (bench.run / "journal.log").exists() else []
    done = _run([sys.executable, "-m", "autofit", "search", "--no-store", *wanted, *limit, *resume], seconds)
    if done is None:
        return "timed out", {}
    answer = json.loads(done.stdout)
    if done.returncode or not answer.get("best"):
        return "failed", {"exit code": done.returncode, "error": answer.get("error") or done.stderr[-300:]}
    outcomes = [trial["outcome"] for trial in answer["trials"]]
    return "done", {
        "search seconds": round(answer["search_seconds"], 1),
        "probes": len(outcomes),
        "out of memory": outcomes.count("out_of_memory"),
        **{
            f"tokens/s of {name}": kept["measured"]["tokens_per_second"]
            for name, kept in {"best": answer["best"], **answer["tiers"]}.items()
            if kept
        },
    }


def loop(bench: Bench, seconds: float) -> Outcome:
    """The emitted train.py against what the probe measured."""
    script = bench.run / "train.py"
    if not script.exists():
        return "left out", {"missing": "a finished search stage"}
    steps = 6 if bench.smoke else 12
    command = [sys.executable, str(script), "--data", str(DATA), "--steps", str(steps), "--log-every", "1"]
    done = _run(command, seconds)
    if done is None:
        return "timed out", {}
    speeds = [float(match[2].replace(",", "")) for match in _SPEED.finditer(done.stdout)]
    if done.returncode or len(speeds) < steps:
        return "failed", {"exit code": done.returncode, "error": done.stderr[-300:]}
    answer = json.loads((bench.directory / "search.json").read_text()) if _stored(bench, "search") else {}
    warm = sorted(speeds[2:])
    median = warm[len(warm) // 2]
    probe = answer.get("figures", {}).get("tokens/s of best")
    return "done", {"tokens/s": round(median), "against the probe": round(median / probe, 3) if probe else None}


def _stored(bench: Bench, stage: str) -> bool:
    return (bench.directory / f"{stage}.json").exists()


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """A command of ours within a time; None when it was up."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None


STAGES: dict[str, Callable[[Bench, float], Outcome]] = {"correct": correct, "search": search, "loop": loop}
