"""Configs estimated and then measured: the rows that the stages memory, speed and levers are all told from.

An estimate is always there, and stored, before its config is measured. Estimates of many configs are made side by side
in processes of their own, while nothing is measured, so that neither disturbs the other.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError, UntraceableError
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.plain import from_plain
from autofit.core.workload import Workload
from autofit.estimate.estimator import estimate_of
from autofit.estimate.rates import rates_for
from autofit.estimate.trace import trace
from autofit.probe import LocalExecutor, Plan, Request
from benchmarks.gpu.bench import Bench, sentence
from benchmarks.gpu.cases import Case
from benchmarks.gpu.store import Row, Store

STAGE = "measured"
PLAN = Plan(min_steps=3, max_steps=10, max_seconds=2.0)
AHEAD = 24  # cases that are estimated together
ESTIMATE_SECONDS = 90.0
_PROBE_LEAST = 12.0  # seconds that have to be left to begin a probe
_MOST_ESTIMATORS = 8  # each holds up to 1.5 GiB
_OF_ESTIMATE = ("estimate", "left_out", "not_estimated")  # entries of a row
UNLIMITED = 1 << 50  # bytes of host memory: what is offloaded is no question here


def measure_all(bench: Bench, cases: Sequence[Case], *, wanted: int | None = None) -> None:
    """Estimate and measure cases in their order until `wanted` of all rows are measured, some at a time."""
    waiting = [case for case in cases if not finished(bench.store.get(STAGE, case.key))]
    with Estimators(bench) as estimators:
        while waiting and (lacking := _lacking(bench, wanted)):
            some, waiting = waiting[: min(lacking, AHEAD)], waiting[min(lacking, AHEAD) :]
            estimators.estimate([case for case in some if bench.store.get(STAGE, case.key) is None])
            for case in some:
                row = bench.store.get(STAGE, case.key)
                if row is not None and not finished(row):
                    bench.need(1.0 if bench.smoke else _PROBE_LEAST)
                    bench.store.add(STAGE, case.key, _measured(bench, case, row))


def _lacking(bench: Bench, wanted: int | None) -> int:
    return AHEAD if wanted is None else max(0, wanted - counted(bench.store.rows(STAGE)))


def finished(row: Row | None) -> bool:
    """Whether nothing more can be learned of a case: it was measured, or there is a reason why it is not."""
    return row is not None and ("measurement" in row or "left_out" in row)


def forget_stale(store: Store) -> None:
    """Drop estimates of an earlier call that nothing was measured beside: they may be of another estimator."""
    if not all(map(finished, store.rows(STAGE).values())):
        store.forget([STAGE], lambda row: not finished(row))


def counted(rows: Mapping[str, Row]) -> int:
    """How many rows hold both figures."""
    return sum(has_both(row) for row in rows.values())


def has_both(row: Row) -> bool:
    """Whether a row holds an estimate and the memory of a run that fitted."""
    measurement = row.get("measurement")
    return bool(
        row.get("estimate") and measurement and measurement["outcome"] == Outcome.FITS.value
    )


class Estimators:
    """Processes that estimate side by side, the measuring one among them; started when first needed, ended together.
    `again`: for the hardware that each case was measured on, which need not be here."""

    def __init__(self, bench: Bench, *, again: bool = False) -> None:
        self._bench = bench
        self._again = again
        self._count = min(max(1, len(os.sched_getaffinity(0)) // 2), _MOST_ESTIMATORS)
        self._more: list[LocalExecutor] = []

    def __enter__(self) -> Estimators:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self._more:
            executor.close()

    def estimate(self, cases: Sequence[Case]) -> None:
        """Estimate cases and store each as it is ready."""
        bench = self._bench
        size = bench.grid.effective_batch_size
        jobs = []
        for case in cases:
            workload = bench.workload(bench.grid.models[case.model], size)
            jobs.append((workload, dict(case.knobs), self._hardware_of(case)))
        if len(jobs) > 1:
            self._more += [
                LocalExecutor(bench.logs, ESTIMATE_SECONDS)
                for _ in range(self._count - 1 - len(self._more))
            ]
        executors = [bench.executor, *self._more]
        free: queue.Queue[LocalExecutor] = queue.Queue()
        for each in executors:
            free.put(each)
        pool = ThreadPoolExecutor(len(executors))
        try:
            futures = {
                pool.submit(self._one, free, *job): case
                for job, case in zip(jobs, cases, strict=True)
            }
            for future in as_completed(futures):
                self._keep(futures[future], future)
        except BaseException:
            for each in self._more:
                each.give_up()  # or its thread would go on waiting
            bench.drop_executor()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _hardware_of(self, case: Case) -> Hardware:
        if not self._again:
            return self._bench.hardware
        row = self._bench.store.get(STAGE, case.key) or {}
        hardware = (
            from_plain(Hardware, row["hardware"]) if "hardware" in row else self._bench.hardware
        )
        return replace(hardware, here=False)

    def _one(
        self,
        free: queue.Queue[LocalExecutor],
        workload: Workload,
        knobs: Mapping[str, Any],
        hardware: Hardware,
    ) -> Row:
        executor = free.get()
        try:
            return _foreseen(executor, workload, knobs, hardware)
        finally:
            free.put(executor)

    def _keep(self, case: Case, future: Future[Row]) -> None:
        former = self._bench.store.get(STAGE, case.key) or _about(case)
        kept = {name: value for name, value in former.items() if name not in _OF_ESTIMATE}
        self._bench.store.add(STAGE, case.key, {**kept, **_entries(future.result)})


def _foreseen(
    executor: LocalExecutor, workload: Workload, knobs: Mapping[str, Any], hardware: Hardware
) -> Row:
    row: Row = executor.run(
        foresee, workload, knobs, hardware, log="estimate.log", timeout=ESTIMATE_SECONDS
    )
    return row


def _about(case: Case) -> Row:
    return {
        "model": case.model,
        "technique": case.technique,
        "lever": case.lever,
        "knobs": dict(case.knobs),
    }


def foresee(workload: Workload, knobs: Mapping[str, Any], hardware: Hardware) -> Row:
    """The estimate of a config by the catalogue alone: nothing that was measured on this device has a part in it."""
    traced = trace(workload, knobs, hardware)
    return estimate_of(
        traced, workload, hardware, rates=rates_for(hardware), calibration=None
    ).to_dict()


def estimated(bench: Bench, workload: Workload, knobs: Mapping[str, Any]) -> Row:
    """One estimate as the entries of a row."""
    return _entries(lambda: _foreseen(bench.executor, workload, knobs, bench.hardware))


def _entries(estimate: Callable[[], Row]) -> Row:
    try:
        return {"estimate": estimate()}
    except (ProbeError, UntraceableError) as error:  # it is measured all the same
        return {"estimate": None, "not_estimated": sentence(error)}
    except InputError as error:
        return {"left_out": sentence(error)}


def _measured(bench: Bench, case: Case, row: Row) -> Row:
    workload = bench.workload(bench.grid.models[case.model], bench.grid.effective_batch_size)
    hardware = bench.hardware
    budget = Budget(hardware.memory_bytes, UNLIMITED)
    estimate = row.get("estimate")
    cap = budget.cap_bytes(hardware.device)
    if estimate and estimate["device_bytes"]["low"] > cap:
        return {**row, "left_out": f"by its estimate it needs more than {cap / 2**30:.0f} GiB"}
    config = techniques.canonicalize(case.knobs, workload, hardware)
    return {**row, **measured(bench, workload, config, budget, PLAN)}


def measured(bench: Bench, workload: Workload, config: Config, budget: Budget, plan: Plan) -> Row:
    """One probe as the entries of a row; `failed` says why there is nothing to learn from it."""
    if bench.smoke:
        plan = replace(plan, max_steps=plan.min_steps)
    number = len(list(bench.logs.glob("[0-9]*.log")))
    try:
        seen = bench.executor.measure(
            workload, Request(config, bench.hardware, budget, plan), number=number
        )
    except (InputError, ProbeError) as error:
        bench.drop_executor()
        seen = Measurement(config, Outcome.FAILED, number, reason=sentence(error))
    row: Row = {"measurement": seen.to_trial(), "hardware": bench.hardware.to_dict()}
    if seen.outcome in (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.DIVERGED):
        row["failed"] = f"{seen.outcome.value}: {seen.reason}"
    return row


def estimate_again(bench: Bench) -> None:
    """Make every stored estimate anew, by the estimator as it is now; the card need not be here."""
    rows = [row for row in bench.store.rows(STAGE).values() if "estimate" in row]
    cases = [Case(row["model"], row["technique"], row["lever"], row["knobs"]) for row in rows]
    with Estimators(bench, again=True) as estimators:
        estimators.estimate(cases)
