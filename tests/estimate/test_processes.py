import functools
import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofit.core.forks import forked
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.processes import Workers, parallel_map
from autofit.estimate.rates import UNKNOWN, Rates, measure
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.probe import LocalExecutor
from autofit.techniques import canonicalize
from tests.processes import number_in, wait_until_gone
from tests.tiny import CPU, llama_workload, mlp_workload

CHANGES: list[dict[str, Any]] = [
    *(
        {"micro_batch_size": size, "activation_checkpointing": kind}
        for size in (1, 4)
        for kind in ("none", "alternate")
    ),
    {"lora_rank": 4, "loss": "chunked"},
    {"precision": "bf16", "optimizer": "adamw-foreach"},
]


def in_child(executor: LocalExecutor, action: Callable[[Workload], Any]) -> Any:
    """What an action returns in a process that may be forked: the tests' own has run threads and backwards."""
    return executor.run(action, mlp_workload(), log="spread.log", timeout=120)


def numbered(_: Workload, processes: int | None) -> tuple[list[tuple[int, int]], int]:
    # what is called need not be pickled
    with parallel_map(lambda value: (value * value, os.getpid()), processes) as each:
        assert each([]) == []
        return each(range(20)) + each([20]), os.getpid()


def test_one_process_is_this_one() -> None:
    found, here = numbered(mlp_workload(), 1)
    assert found == [(value * value, here) for value in range(21)]


@pytest.mark.parametrize("processes", [2, None])
def test_answers_of_forked_processes_come_in_order(
    executor: LocalExecutor, processes: int | None
) -> None:
    found, here = in_child(executor, functools.partial(numbered, processes=processes))
    assert [square for square, _ in found] == [value * value for value in range(21)]
    assert here not in {process for _, process in found}


def seen_by_workers(_: Workload) -> list[set[int]]:
    """The processes that called a function: twice, and once more after they were ended."""
    process_of = lambda _: os.getpid()  # noqa: E731
    workers = Workers(2, process_of)
    processes = [set(workers.map(process_of, range(8))) for _ in range(2)]
    workers.close()
    processes.append(set(workers.map(process_of, range(8))))
    workers.close()
    return processes


def test_workers_live_on_until_they_are_closed(executor: LocalExecutor) -> None:
    first, second, after = in_child(executor, seen_by_workers)
    assert len(first | second) <= 2
    assert not after & (first | second)


def failing(_: Workload) -> str:
    def divided(value: int) -> float:
        return 1 / value

    try:
        with parallel_map(divided, 2) as each:
            each([1, 0])
    except ZeroDivisionError as error:
        return str(error)
    return "nothing"


def in_turn(_: Workload) -> tuple[list[int], list[int]]:
    """What two functions answer, of which the second is added when processes have been forked."""
    workers = Workers(2, abs)
    first = workers.map(abs, [-1, -2])
    workers.functions.append(operator.neg)
    return first, workers.map(operator.neg, [1, 2])


def test_a_function_may_be_added_later(executor: LocalExecutor) -> None:
    """As a search does whose first predictions were in the cache."""
    assert in_child(executor, in_turn) == ([1, 2], [-1, -2])


def test_what_is_raised_there_is_raised_here(executor: LocalExecutor) -> None:
    assert in_child(executor, failing) == "division by zero"


def measured_apart(_: Workload) -> tuple[int, Rates, int]:
    before = psutil.Process().num_threads()
    return before, forked(lambda: measure(0.0))(), psutil.Process().num_threads()


def test_threads_that_are_started_apart_stay_there(executor: LocalExecutor) -> None:
    before, rates, after = in_child(executor, measured_apart)
    assert rates.measured_here
    assert after == before


def killed_while_it_spreads(_: Workload, folder: Path) -> None:
    def tell(name: int) -> None:
        (folder / str(name)).write_text(f"{os.getpid()}\n")
        time.sleep(600)

    middle = os.fork()
    if middle == 0:
        with parallel_map(tell, 2) as each:
            each([0, 1])
    seen = [number_in(folder / str(name)) for name in (0, 1)]
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)
    wait_until_gone(seen)


def test_who_is_killed_while_others_trace_for_it_leaves_none_behind(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    in_child(executor, functools.partial(killed_while_it_spreads, folder=tmp_path))


def disturbed(_: Workload) -> list[int]:
    """A map whose function leaves a thread running, and forks copies that come back from it as well."""

    def value_of(value: int) -> int:
        threading.Thread(target=time.sleep, args=(600,)).start()
        os.fork()
        return value

    with parallel_map(value_of, 2) as each:
        return each(range(6))


def test_threads_and_forks_of_a_model_neither_delay_nor_disturb_the_answers(
    executor: LocalExecutor,
) -> None:
    assert in_child(executor, disturbed) == list(range(6))


def predicted(
    _: Workload, changes: list[dict[str, Any]], rates: Rates, processes: int | None
) -> tuple[list[float], list[float], set[str]]:
    """Bytes and seconds of some configs, and which operators were measured for that."""
    workload = replace(llama_workload(8, 64, num_hidden_layers=7), traits=None)
    configs = [canonicalize(change, workload, CPU) for change in changes]
    workers = Workers(processes)
    estimator = SpaceEstimator(workload, CPU, rates, configs, workers=workers)
    rough = estimator.predict()
    return rough.allocated.tolist(), rough.seconds.tolist(), set(estimator.rates.operators or {})


def test_a_space_traced_on_all_cores_is_predicted_as_on_one(executor: LocalExecutor) -> None:
    alone = in_child(
        executor, functools.partial(predicted, changes=CHANGES, rates=UNKNOWN, processes=1)
    )
    assert (
        in_child(
            executor, functools.partial(predicted, changes=CHANGES, rates=UNKNOWN, processes=2)
        )
        == alone
    )
    assert all(seconds > 0 for seconds in alone[1])


def test_operators_that_were_called_elsewhere_are_measured_here(executor: LocalExecutor) -> None:
    # So slow that every call is worth measuring.
    here = replace(
        UNKNOWN, source="measured on this machine", bandwidth=1e7, matmul={"float32": 1e8}
    )
    alone, spread = (
        in_child(
            executor, functools.partial(predicted, changes=CHANGES[-2:], rates=here, processes=each)
        )[2]
        for each in (1, 2)
    )
    assert {"aten::mm float32", "aten::add float32"} <= alone
    assert spread == alone


def test_predictions_may_be_asked_for_on_all_cores(executor: LocalExecutor) -> None:
    workload = llama_workload(4, 16)
    configs = [canonicalize({"micro_batch_size": size}, workload, CPU) for size in (1, 4)]
    asked = functools.partial(predict_all, measuring=0.1, processes=None)
    nbytes, _ = executor.run(asked, workload, CPU, configs, log="spread.log", timeout=120)
    assert nbytes == predict_all(workload, CPU, configs, measuring=0.1)[0]
