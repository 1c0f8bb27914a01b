"""Stage peers: what other tools reach on the same LoRA training in the same memory, beside what autofit found.

Every peer answers by its own function (`benchmarks.peer_tools`, `usual`), and is then timed over whole steps at the
same effective batch under the same cap, in its own loop where it has one. autofit's answers, of the search before, are
probed again beside them at the peers' rank; where that search measured no LoRA on 16-bit weights, as the peers train, a
quick one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autofit import techniques
from autofit.core.errors import AutofitError
from autofit.core.workload import Workload
from autofit.probe import Plan
from autofit.report.formatting import describe
from benchmarks.gpu import search
from benchmarks.gpu.bench import Bench, LeftOutError, sentence
from benchmarks.gpu.measured import measured
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store
from benchmarks.peers import micro_batch, missing

STAGE = "peers"
PEERS = ("trainer", "accelerate", "torch defaults", "torch, checkpointing", "lightning")
# a loop of its own; none; one that few have installed
REHEARSED = ("trainer", "torch defaults", "lightning")
RANK = 16
OURS = {"lora": "autofit, LoRA", "qlora": "autofit, QLoRA"}
LIKE_PEERS = "autofit, LoRA, by a quick search"
_PLAN = Plan(min_steps=3, max_steps=10, max_seconds=10.0, compose=False)
_SETTLE_SECONDS, _TIME_SECONDS = 240.0, 180.0
_LEAST, _QUICK_SECONDS = 45.0, 90.0


def run(bench: Bench) -> None:
    """autofit's answers first, then peer by peer."""
    what = search.searched(bench)
    gib = what.budgets[0]
    workload = bench.workload(what.model, what.effective_batch_size)
    found = bench.store.get(search.STAGE, search.key_of(gib)) or {}
    tiers = dict(found.get("answer", {}).get("tiers", {}))
    tiers["lora"] = tiers.get("lora") or _like_peers(bench)
    for name, key in OURS.items():
        answer = tiers.get(name)
        if answer and bench.store.get(STAGE, key) is None:
            bench.need(1.0 if bench.smoke else _LEAST)
            knobs = {
                knob: value for knob, value in answer["config"].items() if knob != "lora_alpha"
            }
            config = techniques.canonicalize({**knobs, "lora_rank": RANK}, workload, bench.hardware)
            bench.store.add(
                STAGE, key, measured(bench, workload, config, search.budget_of(gib), _PLAN)
            )
    nbytes = search.budget_of(gib).cap_bytes(bench.device, bench.hardware.context_bytes)
    for tool in REHEARSED if bench.smoke else PEERS:
        _peer(bench, workload, tool, nbytes)
    if not found.get("answer"):
        raise LeftOutError("what autofit reaches waits for the stage search to find something")


def _like_peers(bench: Bench) -> dict[str, Any] | None:
    """The best config of the peers' kind, by a quick search for it alone."""
    found = bench.store.get(STAGE, LIKE_PEERS)
    if found is None:
        bench.need(1.0 if bench.smoke else _QUICK_SECONDS)
        what = search.searched(bench)
        alike = {
            "quantization": ("none",),
            "lora_rank": (str(RANK),),
            "lora_targets": ("all-linear",),
        }
        found = search.quick(bench, replace(what, settings={**what.settings, **alike}))
        bench.store.add(STAGE, LIKE_PEERS, found)
    best: dict[str, Any] | None = found.get("answer", {}).get("best")
    return best


def _peer(bench: Bench, workload: Workload, tool: str, nbytes: int) -> None:
    """What it settles for, and how fast that is: two children, each stored."""
    row = bench.store.get(STAGE, tool)
    if row is None:
        if absent := missing(tool):
            bench.store.add(STAGE, tool, {"left_out": absent})
            return
        bench.need(1.0 if bench.smoke else _LEAST)
        row = _asked(bench, settled, workload, tool, nbytes, seconds=_SETTLE_SECONDS)
        bench.store.add(STAGE, tool, row)
    if row.get("batch_size") and "tokens_per_second" not in row and "failed" not in row:
        bench.need(1.0 if bench.smoke else _LEAST)
        micro = micro_batch(row["batch_size"], workload.effective_batch_size)
        seen = _asked(bench, timed, workload, tool, nbytes, micro, seconds=_TIME_SECONDS)
        bench.store.add(STAGE, tool, {**row, "micro_batch_size": micro, **_renamed(seen)})


# What peers run on is imported where the device may be opened: peft takes bitsandbytes along, which may open it.
def settled(*arguments: Any) -> Row:
    """In a child: what a tool settles for."""
    from benchmarks.gpu import usual

    return usual.settled(*arguments)


def timed(*arguments: Any) -> Row:
    """In a child: how fast that is."""
    from benchmarks.gpu import usual

    return usual.timed(*arguments)


def _asked(
    bench: Bench,
    function: Any,
    workload: Workload,
    tool: str,
    nbytes: int,
    *more: Any,
    seconds: float,
) -> Row:
    arguments = (tool, nbytes, bench.device, *more)
    try:
        row: Row = bench.executor.run(
            function, workload, *arguments, log=f"peer {tool}.log", timeout=bench.at_most(seconds)
        )
    except AutofitError as error:
        return {"failed": sentence(error)}
    return row


def _renamed(seen: Row) -> Row:
    """`seconds` is already what settling took."""
    return {"step_seconds" if name == "seconds" else name: value for name, value in seen.items()}


def summarize(store: Store) -> Summary:
    """Throughput of everyone, and autofit's over each peer's."""
    rows = store.rows(STAGE)
    speeds = {key: speed for key, row in rows.items() if (speed := _speed(row))}
    theirs = {key: speed for key, speed in speeds.items() if key in PEERS}
    figures: dict[str, Any] = {f"tokens/s: {key}": speed for key, speed in speeds.items()}
    best = max(theirs, key=lambda key: theirs[key], default=None)
    if best is not None:
        figures["best peer"] = best
        if OURS["lora"] in speeds:
            figures["over the best peer"] = speeds[OURS["lora"]] / theirs[best]
        if OURS["qlora"] in speeds:
            figures["QLoRA over the best peer"] = speeds[OURS["qlora"]] / theirs[best]
    head = (
        "tool",
        "settles for",
        "micro-batch",
        "tried",
        "out of memory",
        "took, s",
        "tokens/s",
        "autofit's LoRA over it",
    )
    lines = [
        _line(key, row, speeds)
        for key, row in rows.items()
        if "left_out" not in row and key != LIKE_PEERS
    ]
    notes = [row["left_out"] for row in rows.values() if "left_out" in row]
    notes += [
        f"{key}: {row.get('failed') or row['reason']}"
        for key, row in rows.items()
        if row.get("failed") or row.get("reason")
    ]
    return Summary(
        figures, [Table("Peers under the same cap", head, lines)] if lines else [], notes
    )


def _speed(row: Row) -> float | None:
    speed: float | None = row.get("measurement", row).get("tokens_per_second")
    return speed


def _line(key: str, row: Row, speeds: Mapping[str, float]) -> list[str | None]:
    speed, ours = speeds.get(key), speeds.get(OURS["lora"])
    told = f"{speed:,.0f}" if speed else None
    if "measurement" in row:
        return [f"{key}: {describe(row['measurement']['config'])}", *[None] * 5, told, None]
    about = [row.get(name) for name in ("batch_size", "micro_batch_size")]
    spent = (
        [len(row["tried"]), row["out_of_memory"], f"{row['seconds']:.0f}"]
        if "tried" in row
        else [None] * 3
    )
    cells = [None if each is None else str(each) for each in (*about, *spent)]
    return [key, *cells, told, f"x {ours / speed:.2f}" if ours and speed else None]


PEERS_STAGE = Stage(STAGE, share=0.8, least_seconds=120.0, run=run, summarize=summarize)
