"""Stage correct: the tests that are marked gpu, each stored as soon as it ends."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path

from benchmarks.gpu.bench import ROOT, Bench, LeftOutError, TimeUp, python
from benchmarks.gpu.recorder import BEGUN, CALL, FAILED, PASSED, SKIPPED, SPOILT, STAGE, VARIABLE
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Store

TEST_SECONDS = 120  # of one test, torch.compile included
_MARK = "mark.gpu"
_ENDED = (0, 1, 5)  # exit codes of pytest: all passed, some failed, none was left to run
_PROCESSES = 6  # at most


def run(bench: Bench) -> None:
    """Run what has not passed yet, in one process after the other where one is spoilt or dies."""
    if importlib.util.find_spec("pytest") is None:
        raise LeftOutError("pytest is not installed")
    call = str(os.getpid())
    environment = {VARIABLE: str(bench.store.path.absolute()), CALL: call}
    files = marked_files(ROOT / "tests" / "probe" if bench.smoke else ROOT / "tests")
    for _ in range(_PROCESSES):
        ended = python(["-m", "pytest", *_options(), *files], bench.left, environment)
        bench.store.reload()
        if ended is None:
            raise TimeUp
        if ended.code < 0:
            _blame(bench.store, f"its process died: signal {-ended.code}", call)
        elif ended.code in _ENDED or (
            ended.code != SPOILT
            and any("failed" in row for row in bench.store.rows(STAGE).values())
        ):
            return
        elif ended.code != SPOILT:
            raise RuntimeError(f"pytest cannot run: {ended.stdout[-1000:]}{ended.last_words}")


def _options() -> list[str]:
    options = [
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.gpu.recorder",
        "-o",
        "addopts=",
    ]
    # a machine may lack the plugins that the options are of
    options += ["-W", "ignore::pytest.PytestConfigWarning"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        options += ["-o", f"timeout={TEST_SECONDS}"]
    return options


def _blame(store: Store, reason: str, call: str) -> None:
    """The test that was running has failed."""
    for key, row in store.rows(STAGE).items():
        if row["outcome"] == BEGUN:
            store.add(
                STAGE, key, {"outcome": FAILED, "reason": reason, "failed": reason, "call": call}
            )


def marked_files(tests: Path) -> list[str]:
    """The files with such tests: importing all the others takes longer than running these."""
    files = sorted(tests.rglob("test_*.py"))
    return [str(path) for path in files if _MARK in path.read_text(encoding="utf-8")]


def summarize(store: Store) -> Summary:
    """How many ended how, and what failed."""
    rows = store.rows(STAGE)
    count = Counter(row["outcome"] for row in rows.values())
    figures = {name: count[name] for name in (PASSED, FAILED, SKIPPED, BEGUN) if count[name]}
    failed = [[key, row["reason"]] for key, row in rows.items() if row["outcome"] == FAILED]
    hung = [
        f"{key} did not end in its time." for key, row in rows.items() if row["outcome"] == BEGUN
    ]
    skipped = Counter(row["reason"] for row in rows.values() if row["outcome"] == SKIPPED)
    notes = [*hung, *(f"{number} skipped: {reason}" for reason, number in skipped.items())]
    return Summary(
        figures, [Table("Tests that fail", ("test", "reason"), failed)] if failed else [], notes
    )


CORRECT = Stage("correct", share=0.4, least_seconds=60.0, run=run, summarize=summarize)
