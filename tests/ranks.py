"""Ranks for tests: functions that run in several processes at once, which gloo connects."""

import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.warm import Warm

_SECONDS = 60.0


def on_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 30.0,
    answer: float = _SECONDS,
) -> list[Any]:
    """What a function of a module returns on each of some ranks. Raises AssertionError with the tracebacks of those
    that failed. `timeout`: of each collective, in seconds; `answer`: of all that a rank does."""
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes: list[Warm] = []
        for rank in range(count):
            ours, theirs = Pipe(duplex=False)
            number = theirs.fileno()
            given = (number, Path(folder) / "store", rank, count, timeout, function, arguments)
            with theirs:
                processes.append(Warm([_rank, *given], pass_fds=[number]))
            ends.append(ours)
        answers = [_answer(ours, answer) for ours in ends]
        for process in processes:
            _end(process)
    failed = {rank: answer for rank, (worked, answer) in enumerate(answers) if not worked}
    assert not failed, "\n".join(f"rank {rank}: {answer}" for rank, answer in failed.items())
    return [answer for _, answer in answers]


def _end(process: Warm) -> None:
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answer(end: Any, seconds: float) -> tuple[bool, Any]:
    try:
        return end.recv() if end.poll(seconds) else (False, "no answer")  # type: ignore[no-any-return]
    except EOFError:
        return False, "the process ended without an answer"


def _rank(
    number: int,
    store: Path,
    rank: int,
    count: int,
    timeout: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch
    import torch.distributed as dist

    answers = Connection(number, readable=False)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(count)
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit
        )
        answers.send((True, function(*arguments)))
        if dist.is_initialized():  # the function may have left it
            dist.destroy_process_group()
    except BaseException:
        answers.send((False, traceback.format_exc()))
