"""Stage listed: the configs of a list, in the order of what they tell.

A list is a JSON file such as `first.json`. Each case says what it tells, so that a plan of the time can be read before
a card is there. What a case measures is stored with the hardware, so that it can be predicted again without it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.core.budget import Budget, gib_to_bytes
from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement
from autofit.core.plain import from_plain
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.models import resolve
from autofit.probe import LocalExecutor, Plan, Request
from benchmarks.gpu import figures
from benchmarks.gpu.bench import Bench, looked_at, sentence, stored_traits
from benchmarks.gpu.kinds import kind_of, kinds_table
from benchmarks.gpu.measured import STAGE as MEASURED
from benchmarks.gpu.measured import UNLIMITED
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store

STAGE = "listed"
_PLAN = Plan(min_steps=3, max_steps=8, max_seconds=1.5)
_LEAST_SECONDS = 8.0  # that have to be left to begin a case
_WARM_UP = 3  # micro-batches before a profile
_KERNELS = 40  # of a profile that are kept, the longest


@dataclass(frozen=True)
class Listed:
    """One config of a list: `tells` says what it is measured for, `seconds` what it may take."""

    name: str
    tells: str
    model: str
    knobs: Mapping[str, Any]
    seq: int = 2048
    batch: int = 16
    gib: float | None = None  # None: the whole card
    profile: bool = False
    seconds: float = 60.0

    def workload(self) -> Workload:
        """The training that it is of."""
        return resolve(self.model, sequence_length=self.seq, effective_batch_size=self.batch)

    def budget(self, hardware: Hardware) -> Budget:
        """What its probe is held to."""
        nbytes = gib_to_bytes(self.gib) if self.gib else hardware.memory_bytes
        return Budget(nbytes, UNLIMITED)


def read_list(path: Path) -> list[Listed]:
    """The cases of a file."""
    return [Listed(**each) for each in json.loads(path.read_text(encoding="utf-8"))]


def run(bench: Bench) -> None:
    """Measure what is missing of the list of this machine."""
    measure_list(
        bench.store,
        bench.executor,
        bench.hardware,
        read_list(bench.grid.listed),
        left=lambda: bench.left,
    )


def measure_list(
    store: Store,
    executor: LocalExecutor,
    hardware: Hardware,
    cases: Sequence[Listed],
    *,
    left: Callable[[], float],
) -> None:
    """Measure the cases that are not stored yet, one after the other while `left()` seconds suffice."""
    for number, case in enumerate(cases):
        if store.get(STAGE, case.name) is not None:
            continue
        if left() < _LEAST_SECONDS:
            print(f"time is up before {case.name}", flush=True)
            return
        start = time.monotonic()
        row = {**asdict(case), "hardware": hardware.to_dict()}
        try:
            row |= _measured(store, executor, hardware, case, number, min(case.seconds, left()))
        except AutofitError as error:
            row["failed"] = sentence(error)
        store.add(STAGE, case.name, row)
        print(f"{time.monotonic() - start:6.1f} s  {case.name}: {_told(row)}", flush=True)


def _measured(
    store: Store,
    executor: LocalExecutor,
    hardware: Hardware,
    case: Listed,
    number: int,
    seconds: float,
) -> Row:
    plain = case.workload()
    known = stored_traits(store, case.model) or looked_at(
        store, executor, case.model, plain, hardware.device
    )
    workload = replace(plain, traits=known)
    config = techniques.canonicalize(case.knobs, workload, hardware)
    if reason := techniques.refuse(config, workload, hardware):
        return {"left_out": reason}
    if case.profile:
        log = f"{number:04d}.log"
        return {
            "profiled": executor.run(profiled, workload, config, hardware, log=log, timeout=seconds)
        }

    request = Request(config, hardware, case.budget(hardware), replace(_PLAN, seconds=seconds))
    return {"measurement": executor.measure(workload, request, number=number).to_trial()}


def profiled(workload: Workload, config: Config, hardware: Hardware, micro_batches: int = 2) -> Row:
    """In a child: of so many micro-batches the seconds on the clock, until all was launched, and within kernels; how
    many kernels there were, and the longest of them as (name, count, microseconds)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from autofit.data.batch import samples_of
    from autofit.training.build import build
    from autofit.training.step import accumulate, update

    is_cuda = hardware.device == "cuda"
    setup = build(workload, config, hardware)
    samples = micro_batches * setup.micro_batch_size
    part = samples_of(workload.batch(workload.effective_batch_size), 0, samples, workload.split)

    def wait() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    for _ in range(_WARM_UP):
        float(accumulate(setup, part))
        update(setup)
    wait()

    start = time.perf_counter()
    loss = accumulate(setup, part)
    launched = time.perf_counter() - start
    float(loss)
    wait()
    wall = time.perf_counter() - start

    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as seen:
        float(accumulate(setup, part))
        wait()
    kernels = []
    for each in seen.key_averages():
        microseconds = each.self_device_time_total if is_cuda else each.self_cpu_time_total
        if microseconds > 0:
            kernels.append((each.key[:90], each.count, microseconds))
    kernels.sort(key=lambda kernel: -kernel[2])
    return {
        "wall": wall,
        "launched": launched,
        "kernels": sum(microseconds for _, _, microseconds in kernels) / 1e6,
        "count": sum(count for _, count, _ in kernels),
        "longest": kernels[:_KERNELS],
    }


def _told(row: Row) -> str:
    """What came of a case, in a line."""
    if reason := row.get("failed") or row.get("left_out"):
        return str(reason)
    if "profiled" in row:
        return "profiled"
    seen = Measurement.from_trial(row["measurement"])
    if seen.tokens_per_second is None:
        return f"{seen.outcome.value}: {(seen.reason or '')[-150:]}"
    return f"{seen.tokens_per_second:,.0f} tokens/s, probe {seen.seconds:.1f} s"


def estimate_again(store: Store) -> None:
    """Predict what was measured anew, each row as its own hardware would have run it, which need not be here."""
    groups: dict[str, list[tuple[str, Row]]] = {}
    for key, row in store.rows(STAGE).items():
        if "measurement" in row:
            alike = json.dumps([row[name] for name in ("model", "seq", "batch", "hardware")])
            groups.setdefault(alike, []).append((key, row))

    for group in groups.values():
        first = group[0][1]
        hardware = replace(from_plain(Hardware, first["hardware"]), here=False)
        workload = replace(_case_of(first).workload(), traits=stored_traits(store, first["model"]))
        configs = [techniques.canonicalize(row["knobs"], workload, hardware) for _, row in group]
        for (key, row), nbytes, seconds in zip(
            group, *predict_all(workload, hardware, configs), strict=True
        ):
            known = not math.isnan(seconds)
            estimate = {
                "allocated_bytes": int(nbytes),
                "reserved_bytes": None,
                "step_seconds": seconds,
            }
            store.add(STAGE, key, {**row, "estimate": estimate if known else None})


def _case_of(row: Row) -> Listed:
    return Listed(**{name: row[name] for name in Listed.__dataclass_fields__})


def summarize(store: Store) -> Summary:
    """What each case came to, and how predictions compare, kind by kind."""
    rows = store.rows(STAGE)
    lines = [_line(row) for row in rows.values()]
    head = (
        "config",
        "tells",
        "tokens/s",
        "step, s",
        "predicted, s",
        "allocated, GiB",
        "predicted, GiB",
    )
    tables = [Table("Configs of a list", head, lines)] if lines else []
    found: dict[str, Any] = {"configs": len(lines)} if lines else {}
    if errors := figures.Errors.of(figures.step_pairs(rows.values())):
        found |= {"step time median": errors.median, "step time worst": errors.worst}
    if kinds := kinds_table([*rows.values(), *store.rows(MEASURED).values()]):
        tables.append(kinds)
    return Summary(
        found, tables, [f"{key}: {row['failed']}" for key, row in rows.items() if row.get("failed")]
    )


def _line(row: Row) -> list[str | None]:
    seen, estimate = row.get("measurement") or {}, row.get("estimate") or {}
    step, peak = seen.get("step_seconds"), seen.get("peak_bytes")
    return [
        f"{row['name']} ({kind_of(row['knobs'])})",
        row["tells"],
        _told(row) if not seen.get("tokens_per_second") else f"{seen['tokens_per_second']:,.0f}",
        f"{step['median']:.3f}" if step else None,
        f"{estimate['step_seconds']:.3f}" if estimate else None,
        f"{peak['allocated'] / 2**30:.2f}" if peak else None,
        f"{estimate['allocated_bytes'] / 2**30:.2f}" if estimate else None,
    ]


LISTED = Stage(STAGE, share=0.8, least_seconds=60.0, run=run, summarize=summarize)
