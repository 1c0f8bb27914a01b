"""Ranks for tests: functions that run in several processes at once, which gloo connects.

The processes are forked from a server that has imported everything and computed nothing: one that has computed with
several threads must not be forked.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_SECONDS = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "tests.tiny",
        "autofit.training.session",
        "torch.distributed.fsdp",
        "peft",
        "bitsandbytes",
        "torchao.optim",
    ]
)


def on_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 30.0
) -> list[Any]:
    """What a function of a module returns on each of some ranks. Raises AssertionError with the tracebacks of those
    that failed. `timeout`: of each collective, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [_context.Pipe(duplex=False) for _ in range(count)]
        processes: list[Any] = []
        for rank, (_, theirs) in enumerate(ends):
            given = (theirs, Path(folder) / "store", rank, count, timeout, function, arguments)
            processes.append(_context.Process(target=_rank, args=given))
            processes[-1].start()
            theirs.close()
        answers = [_answer(ours) for ours, _ in ends]
        for process in processes:
            process.join(1)
            process.kill()
    failed = {rank: answer for rank, (worked, answer) in enumerate(answers) if not worked}
    assert not failed, "\n".join(f"rank {rank}: {answer}" for rank, answer in failed.items())
    return [answer for _, answer in answers]


def _answer(end: Any) -> tuple[bool, Any]:
    try:
        return end.recv() if end.poll(_SECONDS) else (False, "no answer")  # type: ignore[no-any-return]
    except EOFError:
        return False, "the process ended without an answer"


def _rank(
    answers: Any,
    store: Path,
    rank: int,
    count: int,
    timeout: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch
    import torch.distributed as dist

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
