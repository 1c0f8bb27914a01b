"""Stage speed: predicted step times against measured ones, and the utilisation of a full fine-tune that has room.

The ranks are of what the stages memory and levers have measured. For the utilisation the configs of a 1.5B model that
are predicted to be fastest are measured, with and without compilation in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, zip_longest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.options import SearchOptions
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.probe import Plan
from autofit.report.formatting import describe
from autofit.tuning.space import legal_configs
from benchmarks.gpu import figures
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.measured import ESTIMATE_SECONDS, UNLIMITED, estimated, measured
from benchmarks.gpu.measured import STAGE as MEASURED
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store

STAGE = "speed"
CANDIDATES = "candidates"
_FASTEST = 3  # of each kind
_PLAN = Plan(min_steps=3, max_steps=10, max_seconds=5.0, compose=False)
_LEAST = 25.0
_BATCH = 32  # samples
_SMOKE = {
    "optimizer": "adamw",
    "attention": "sdpa",
    "loss": "standard",
    "activation_checkpointing": "none",
}


def run(bench: Bench) -> None:
    """Measure what is predicted to be fastest."""
    preset = bench.grid.models["tiny" if bench.smoke else "1.5B"]
    workload = bench.workload(preset, bench.grid.effective_batch_size if bench.smoke else _BATCH)
    budget = Budget(bench.hardware.memory_bytes, UNLIMITED)
    known = bench.store.get(STAGE, CANDIDATES)
    if known is None:
        found = bench.executor.run(
            fastest,
            workload,
            bench.hardware,
            {"precision": "bf16", **(_SMOKE if bench.smoke else {})},
            1 if bench.smoke else _FASTEST,
            bench.measuring,
            log="estimate.log",
            timeout=bench.at_most(2 * ESTIMATE_SECONDS),
        )
        known = {"configs": [dict(config) for config in found]}
        bench.store.add(STAGE, CANDIDATES, known)
    for config in map(Config, known["configs"]):
        if bench.store.get(STAGE, config.key) is None:
            bench.need(1.0 if bench.smoke else _LEAST)
            row = {"config": dict(config), **estimated(bench, workload, config)}
            bench.store.add(
                STAGE, config.key, {**row, **measured(bench, workload, config, budget, _PLAN)}
            )


def fastest(
    workload: Workload, hardware: Hardware, knobs: Mapping[str, str], count: int, measuring: float
) -> list[Config]:
    """The configs with these knobs that are predicted to be fastest on the whole card, compiled ones and others in
    turn."""
    options = SearchOptions(space="full", set=dict(knobs), device=hardware.device)
    configs = legal_configs(options, workload, hardware)
    nbytes, seconds = predict_all(workload, hardware, configs, measuring=measuring, processes=None)
    cap = Budget(hardware.memory_bytes, UNLIMITED).cap_bytes(
        hardware.device, hardware.context_bytes
    )
    fitting = sorted((time, place) for place, time in enumerate(seconds) if nbytes[place] <= cap)
    ranked = [configs[place] for _, place in fitting]
    plain = [config for config in ranked if config["compile"] == "none"][:count]
    compiled = [config for config in ranked if config["compile"] != "none"][:count]
    return [
        config for config in chain.from_iterable(zip_longest(plain, compiled)) if config is not None
    ]


def summarize(store: Store) -> Summary:
    """The errors and ranks of all step times, by model; the utilisation of what is fastest."""
    groups = figures.by_lever(store.rows(MEASURED).values())
    models = {row["model"] for row in groups["all"]}
    rows = [
        _line(name, each)
        for name, each in groups.items()
        if name in ("all", "full", "lora", "qlora", *models)
    ]
    tried = {key: row for key, row in store.rows(STAGE).items() if key != CANDIDATES}
    found: dict[str, float | None] = {"configs": len(figures.step_pairs(groups["all"]))}
    if errors := figures.Errors.of(figures.step_pairs(groups["all"])):
        correlation = figures.rank_correlation(figures.step_pairs(groups["all"]))
        found |= {
            "step time median": errors.median,
            "step time worst": errors.worst,
            "rank correlation": correlation,
        }
    shares = {
        key: share for key, row in tried.items() if (share := figures.utilisation(row)) is not None
    }
    if shares:
        found["utilisation"] = max(shares.values())
    head = (
        "group",
        "configs",
        "step time: median error",
        "90 %",
        "worst",
        "bias",
        "ranks",
        "best utilisation",
    )
    tables = (
        [Table("Speed: predicted against measured step time", head, rows)] if groups["all"] else []
    )
    if tried:
        best = sorted(tried, key=lambda key: shares.get(key, 0.0), reverse=True)
        head = ("config", "tokens/s", "utilisation", "predicted", "reason")
        tables.append(
            Table("Full fine-tune in bf16 with room", head, [_tried(tried[key]) for key in best])
        )
    notes = [row["failed"].strip().splitlines()[-1] for row in tried.values() if row.get("failed")]
    return Summary(found, tables, notes)


def _line(name: str, rows: list[Row]) -> list[str | None]:
    pairs = figures.step_pairs(rows)
    errors, correlation = figures.Errors.of(pairs), figures.rank_correlation(pairs)
    shares = [share for row in rows if (share := figures.utilisation(row)) is not None]
    return [
        name,
        str(len(pairs)),
        *(
            [f"{each:.1%}" for each in (errors.median, errors.p90, errors.worst)]
            if errors
            else [None] * 3
        ),
        f"{errors.bias:+.1%}" if errors else None,
        None if correlation is None else f"{correlation:.3f}",
        f"{max(shares):.1%}" if shares else None,
    ]


def _tried(row: Row) -> list[str | None]:
    measurement, estimate = row["measurement"], row.get("estimate") or {}
    speed, share, predicted = (
        measurement["tokens_per_second"],
        figures.utilisation(row),
        estimate.get("utilisation"),
    )
    return [
        describe(row["config"]),
        None if speed is None else f"{speed:,.0f}",
        None if share is None else f"{share:.1%}",
        None if predicted is None else f"{predicted:.1%}",
        measurement["reason"] and measurement["reason"].strip().splitlines()[-1],
    ]


SPEED = Stage(STAGE, share=0.4, least_seconds=45.0, run=run, summarize=summarize)
