"""A row that ends its process, or does not end, is a row's result; the next one has a new process."""

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from benchmarks.zoo import workers
from benchmarks.zoo.families import Family
from benchmarks.zoo.workers import Worker


def serve(connection: Connection) -> None:
    """In place of the real one: does what a family is called."""
    while True:
        family, _ = connection.recv()
        if family.name == "crashes":
            os._exit(7)
        if family.name == "hangs":
            time.sleep(600)
        connection.send({"pid": os.getpid()})


def test_a_crash_and_a_hang_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "serve", serve)

    def of(name: str) -> dict[str, Any]:
        return worker.row(Family("plain", name, "custom"))

    with Worker(seconds=60) as worker:
        first = of("works")
        assert of("works") == first
        assert of("crashes") == {"failed": "the process ended with code 7"}
        second = of("works")
        assert second["pid"] != first["pid"]
        worker.seconds = 0.1
        assert of("hangs") == {"failed": "took more than 0 s"}
    assert worker._process is None
