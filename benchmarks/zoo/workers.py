"""A warm process that measures row after row, and is replaced where a row crashes it or does not end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from benchmarks.zoo.families import Family

ROW_SECONDS = 400.0
_START_SECONDS = 120.0
_PROBE_SECONDS = 60.0


class Worker:
    """Rows from a process of its own, which starts with the first one."""

    def __init__(self, seconds: float = ROW_SECONDS) -> None:
        self.seconds = seconds
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def row(self, family: Family, *, searched: bool = False) -> dict[str, Any]:
        """The row of a family, or what its searches add to it, whatever becomes of the process."""
        fresh = self._connection is None
        connection = self._connection or self._start()
        try:
            connection.send((family, searched))
            if not connection.poll(self.seconds + (_START_SECONDS if fresh else 0.0)):
                self._end()
                return {"failed": f"took more than {self.seconds:.0f} s"}
            answer: dict[str, Any] = connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self._end()
            return {"failed": f"the process ended with code {code}"}
        return answer

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,))
        self._process.start()
        theirs.close()
        return self._connection

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._process.join(5)
            if self._process.is_alive():
                os.kill(self._process.pid, signal.SIGKILL)  # its zygote ends with it
                self._process.join()
        self._process = self._connection = None


def serve(connection: Connection) -> None:
    """In the worker: measure the families that are sent until none comes."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # before torch: on tensors this small, threads only wait for each other
    )
    from autofit.core.environment import set_defaults

    set_defaults()
    warnings.simplefilter("ignore")
    from autofit.probe import LocalExecutor
    from benchmarks.zoo.families import NotBuiltError, written
    from benchmarks.zoo.row import plain, searched, tried

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalExecutor(Path(folder), timeout=_PROBE_SECONDS) as executor,
        contextlib.suppress(EOFError, BrokenPipeError),  # the parent has ended
    ):
        while True:
            family, is_search = connection.recv()
            try:
                model, options = written(family, Path(folder))
                if is_search:
                    answer = searched(model, executor, options=options, command=family.by_command)
                else:
                    answer = plain(tried(model, executor, options=options))
            except NotBuiltError as error:
                answer = {"left_out": str(error)}
            except Exception:
                answer = {"failed": traceback.format_exc()[-1500:]}
            connection.send(answer)
