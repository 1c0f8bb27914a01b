"""Stage loop: the train.py that a search wrote, and autofit.fit, against the probe; the loop against one by hand.

All of them run the best config of the first search, or that of a small model where the first has no train.py, one after
the other; the probe is taken again beside them.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import autofit
from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.workload import Workload
from autofit.hardware.tracker import StorageTracker
from autofit.probe import Plan
from autofit.training.loop import StepReport
from benchmarks.gpu import search
from benchmarks.gpu.bench import Bench, LeftOutError, sentence
from benchmarks.gpu.measured import measured
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store
from benchmarks.loop_overhead import DATA, LR, Overhead, overheads
from benchmarks.peer_tools import Rows
from benchmarks.run_apart import script

STAGE = "loop"
PROBE, TRAIN_PY, FIT, OVERHEAD = "probe", "train.py", "fit", "overhead"
SMALL = "the search of a small model"
_PLAN = Plan(min_steps=3, max_steps=20, max_seconds=6.0, compose=False)
_STEPS = 6
_LEAST, _CHILD, _QUICK_SECONDS = 40.0, 240.0, 90.0


def run(bench: Bench) -> None:
    """Each of the three runs, then the overhead."""
    runs: dict[str, Callable[[], Row]] = {}
    what, found = _searched(bench)
    if "answer" in found:
        config = Config(found["answer"]["best"]["config"])
        workload = bench.workload(what.model, what.effective_batch_size)
        budget = search.budget_of(what.budgets[0])
        runs = {
            PROBE: lambda: measured(bench, workload, config, budget, _PLAN),
            TRAIN_PY: lambda: _script(bench, found["files"], workload),
            FIT: lambda: apart(bench, fitted, workload, config, bench.device, log="fit.log"),
        }
    overhead = {
        OVERHEAD: lambda: apart(bench, hand_against_loop, None, bench.smoke, log="overhead.log")
    }
    for key, action in {**runs, **overhead}.items():
        if bench.store.get(STAGE, key) is None:
            bench.need(1.0 if bench.smoke else _LEAST)
            bench.store.add(STAGE, key, action())
    if not runs:
        raise LeftOutError("train.py and fit wait for a search to find something")


def _searched(bench: Bench) -> tuple[search.Search, Row]:
    """The first search; or one of a small model, where the first wrote no train.py, since its best has none."""
    what = search.searched(bench)
    found = bench.store.get(search.STAGE, search.key_of(what.budgets[0])) or {}
    if "answer" not in found or "train.py" in found["files"]:
        return what, found

    small = bench.store.get(STAGE, SMALL)
    if small is None:
        bench.need(1.0 if bench.smoke else _QUICK_SECONDS)
        small = search.quick(bench, search.SMALL)
        bench.store.add(STAGE, SMALL, small)
    return search.SMALL, small


def apart(
    bench: Bench, function: Callable[..., Row], workload: Workload | None, *arguments: Any, log: str
) -> Row:
    """What a function makes in a child, or why it did not."""
    try:
        row: Row = bench.executor.run(
            function, workload, *arguments, log=log, timeout=bench.at_most(_CHILD)
        )
    except AutofitError as error:
        bench.need(1.0)  # or the stage's time is up, and it is run the next time
        return {"failed": sentence(error)}
    return row


def hand_against_loop(_: Workload | None, smoke: bool) -> Row:
    """The benchmark of the loop's overhead, on the device that is here, in this process."""
    return {"rows": [{**asdict(each), "reached": each.reached} for each in overheads(smoke=smoke)]}


def _script(bench: Bench, files: Mapping[str, str], workload: Workload) -> Row:
    """train.py as it was written, on a text long enough for a batch."""
    if "train.py" not in files:
        return {"failed": "the search wrote no train.py for this config; its notes say why"}
    path, data = bench.work / "train.py", bench.work / "text.txt"
    path.write_text(files["train.py"])
    text, wanted = (
        DATA.read_text(encoding="utf-8"),
        workload.effective_batch_size * (workload.sequence_length or 1),
    )
    data.write_text(text * (2 + wanted // len(text)), encoding="utf-8")
    options = ["--data", str(data), "--steps", str(_STEPS), "--log-every", "1"]
    return apart(bench, scripted, None, str(path), options, bench.device, log="train.py.log")


def scripted(_: Workload | None, path: str, options: Sequence[str], device: str) -> Row:
    """In a child: train.py, with what it reached."""
    draw_on(device)
    ran = script(None, path, options, device)
    return {"tokens_per_second": ran.tokens_per_second, "peak_bytes": ran.peak_bytes}


def draw_on(device: str) -> None:
    """Let models of this process have their random weights drawn there and then moved to the host, where train.py
    would draw those of an 8B model for minutes; the peak counts from then on."""
    made = AutoModelForCausalLM.from_config

    def from_config(*args: Any, **kwargs: Any) -> Any:
        with torch.device(device):
            model = made(*args, **kwargs)
        model = model.to("cpu")
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return model

    AutoModelForCausalLM.from_config = from_config


def fitted(workload: Workload, config: Config, device: str) -> Row:
    """Train a living model with autofit.fit, the way a user does; its first two steps are not timed.

    On CUDA the peak is that from the second step on: the user's model is made in float32, and outgrows the cap before.
    """
    torch.manual_seed(0)
    with torch.device(device):  # on the host the weights of an 8B model are drawn for a minute
        model = workload.model()
    loader = DataLoader(Rows(workload), batch_size=workload.effective_batch_size)
    seconds: list[float] = []

    def note(report: StepReport) -> None:
        if device == "cuda" and not seconds:
            torch.cuda.reset_peak_memory_stats()
        seconds.append(report.seconds)

    tracker = StorageTracker()
    with tracker if device == "cpu" else contextlib.nullcontext():
        autofit.fit(
            model,
            loader,
            lr=LR,
            steps=_STEPS,
            config=config,
            device=device,
            callbacks=(note,),
            progress=False,
        )
    tokens = workload.effective_batch_size * (workload.sequence_length or 1)
    peak = tracker.peak if device == "cpu" else torch.cuda.max_memory_allocated()
    return {"tokens_per_second": tokens / statistics.median(seconds[2:]), "peak_bytes": peak}


def summarize(store: Store) -> Summary:
    """Each way of training against the probe beside it."""
    rows = store.rows(STAGE)
    found = {key: _speed_and_peak(rows[key]) for key in (PROBE, TRAIN_PY, FIT) if key in rows}
    speed, peak = found.get(PROBE, (None, None))
    figures: dict[str, Any] = {}
    lines: list[list[str | None]] = []
    for key, (its_speed, its_peak) in found.items():
        share = its_speed / speed if its_speed and speed else None
        of_peak = its_peak / peak if its_peak and peak else None
        if key != PROBE and share is not None:
            figures |= {f"{key} off by": abs(1 - share), f"{key} peak of the probe's": of_peak}
        shown = (f"{share:.1%}" if share else None, f"{its_peak / 2**30:.3f}" if its_peak else None)
        lines.append(
            [
                key,
                f"{its_speed:,.0f}" if its_speed else None,
                *shown,
                f"{of_peak:.1%}" if of_peak else None,
            ]
        )
    head = ("run", "tokens/s", "of the probe", "peak allocated, GiB", "of the probe")
    of_small = f": {search.SMALL.model}" if SMALL in rows else ""
    tables = [Table(f"Training against the probe{of_small}", head, lines)] if lines else []
    overhead = rows.get(OVERHEAD, {}).get("rows", [])
    if overhead:
        figures["overheads reached"] = (
            f"{sum(each['reached'] for each in overhead)} of {len(overhead)}"
        )
        head = ("step", "by hand, ms", "by the loop, ms", "difference, ms", "reached")
        tables.append(
            Table("The loop against one by hand", head, [_overhead_line(each) for each in overhead])
        )
    return Summary(
        figures, tables, [f"{key}: {row['failed']}" for key, row in rows.items() if "failed" in row]
    )


def _speed_and_peak(row: Row) -> tuple[float | None, float | None]:
    measurement = row.get("measurement")
    if measurement is None:
        return row.get("tokens_per_second"), row.get("peak_bytes")
    peak = measurement["peak_bytes"]
    return measurement["tokens_per_second"], peak and peak["allocated"]


def _overhead_line(row: Mapping[str, Any]) -> list[str | None]:
    each = Overhead(
        **{name: row[name] for name in ("name", "by_hand", "by_loop", "difference", "ranks")}
    )
    times = [f"{value * 1e3:.3f}" for value in (each.by_hand, each.by_loop, each.difference)]
    return [each.name, *times, "yes" if each.reached else "no"]


LOOP = Stage(STAGE, share=0.6, least_seconds=90.0, run=run, summarize=summarize)
