"""The journal opens in optuna-dashboard: the command is started on it, and asked what it shows."""

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autofit.core.measurement import Outcome
from autofit.search.journal import Journal
from autofit.search.study import Limits, SearchOutcome, search

# which takes seconds to import
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("optuna_dashboard") is None, reason="optuna-dashboard is not installed"
)
_START = (
    "import sys; from optuna_dashboard._cli import main; sys.argv[0] = 'optuna-dashboard'; main()"
)
_SECONDS = 60.0  # in which it has to answer: it imports optuna first


@pytest.fixture
def found(tmp_path: Path, formula: Any) -> SearchOutcome:
    """A search that has left its journal."""
    problem = formula()
    journal = Journal(tmp_path / "journal.log", {"model": "m"})
    return search(problem.space, problem.problem(), limits=Limits(trials=8), journal=journal)


@pytest.fixture
def ask(found: SearchOutcome, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """GET of a path from a dashboard that runs on the journal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        _START,
        str(tmp_path / "journal.log"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    with (tmp_path / "dashboard.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        _wait(process, port)
        yield lambda path: json.loads(_get(port, path))
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            _get(port, "/api/meta")
            return
        except OSError:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "it does not answer"
            time.sleep(0.05)


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    return body


def test_every_measurement_is_a_trial_of_its_study(
    found: SearchOutcome, ask: Callable[[str], Any]
) -> None:
    (summary,) = ask("/api/studies")["study_summaries"]
    assert summary["directions"] == ["maximize"]
    trials = ask(f"/api/studies/{summary['study_id']}")["trials"]
    assert [trial["number"] for trial in trials] == [each.number for each in found.measurements]
    states = [
        "Complete" if each.outcome is Outcome.FITS else "Pruned" for each in found.measurements
    ]
    assert [trial["state"] for trial in trials] == states
    assert "Complete" in states
    for trial, each in zip(trials, found.measurements, strict=True):
        assert trial.get("values") == ([each.throughput] if each.fits else None)
        shown = {
            parameter["name"]: parameter["param_external_value"] for parameter in trial["params"]
        }
        assert shown["precision"] == each.config["precision"]
        assert shown["micro_batch_size"] == str(each.config["micro_batch_size"])
