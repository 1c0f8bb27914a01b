"""A plugin of pytest that stores the outcome of each test as soon as it is known, and runs none twice that passed.

A test that was running when the time was up is run last the next time: it may be the one that hangs. After an error of
CUDA, which spoils its process for all tests to come, the process ends, and the stage starts another.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.store import Store

STAGE = "correct"
VARIABLE = "AUTOFIT_BENCH_STORE"  # where the store is
CALL = "AUTOFIT_BENCH_CALL"  # the call of the benchmark: what fails is tried again in the next one, not in this
SPOILT = 77  # exit code
_SPOILS = "CUDA error"
BEGUN, PASSED, FAILED, SKIPPED = "begun", "passed", "failed", "skipped"

_store: list[Store] = []


def _kept() -> Store:
    if not _store:
        _store.append(Store(Path(os.environ[VARIABLE])))
    return _store[0]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what has passed or was skipped, or has failed in this call, and put last what did not end."""
    known = _kept().rows(STAGE)
    done = [item for item in items if _done(known.get(item.nodeid))]
    if done:
        config.hook.pytest_deselected(items=done)
    left = [item for item in items if item not in done]
    items[:] = sorted(left, key=lambda item: known.get(item.nodeid, {}).get("outcome") == BEGUN)


def _done(row: dict[str, Any] | None) -> bool:
    return row is not None and (
        row["outcome"] in (PASSED, SKIPPED) or row.get("call") == os.environ.get(CALL, "")
    )


def pytest_runtest_logstart(nodeid: str) -> None:
    """It is running."""
    _kept().add(STAGE, nodeid, {"outcome": BEGUN})


def pytest_runtest_logreport(report: Any) -> None:
    """What became of it: of its setup where that did not pass, else of its call, and of a teardown that failed."""
    if report.when == "call" or not report.passed:
        _keep(report, seconds=round(report.duration, 2))
    if report.failed and _SPOILS in str(report.longrepr):
        pytest.exit("an error of CUDA spoils its process", returncode=SPOILT)


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported is a failure of all its tests."""
    if report.failed:
        _keep(report)


def _keep(report: Any, **more: Any) -> None:
    reason = _reason(report)
    failed = {"failed": reason, "call": os.environ.get(CALL, "")} if report.failed else {}
    _kept().add(
        STAGE, report.nodeid, {"outcome": report.outcome, "reason": reason, **failed, **more}
    )


def _reason(report: Any) -> str | None:
    if report.passed:
        return None
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return "\n".join(str(report.longrepr).strip().splitlines()[-12:])
