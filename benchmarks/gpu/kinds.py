"""Kinds of configs: what decides how a step spends its time. Within one, predictions err alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.figures import Errors, memory_pairs, step_pairs
from benchmarks.gpu.stage import Table
from benchmarks.gpu.store import Row

_HEAD = (
    "kind",
    "configs",
    "step time: predicted / measured",
    "least",
    "most",
    "allocated: worst error",
)


def kind_of(config: Mapping[str, Any]) -> str:
    """The quantisation of frozen weights and where they stay, or full training; and whether it is compiled."""
    precision = str(config.get("precision", "bf16"))
    weights = str(config.get("quantization") or "none")
    if weights == "none":
        weights = "fp8" if precision == "fp8" else "16 bits"
    if not config.get("lora_rank"):
        parts = ["full" if weights == "16 bits" else f"full, {weights}"]
    else:
        is_streamed = config.get("parameter_offload") not in (None, "none")
        parts = [f"LoRA on {weights}", "streamed" if is_streamed else "resident"]
    if config.get("compile") not in (None, "none"):
        parts.append("compiled")
    return ", ".join(parts)


def by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Measured rows by their kinds, which are sorted."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("measurement"):
            found.setdefault(kind_of(row["measurement"]["config"]), []).append(row)
    return dict(sorted(found.items()))


def ratios(rows: Sequence[Row]) -> list[float]:
    """Predicted over measured step times."""
    return [predicted / seen for predicted, seen in step_pairs(rows)]


def mean_ratio(rows: Sequence[Row]) -> float | None:
    """The geometric mean of them; None where nothing is known."""
    found = ratios(rows)
    return statistics.geometric_mean(found) if found else None


def kinds_table(rows: Iterable[Row]) -> Table | None:
    """How predictions compare, kind by kind; None where nothing does."""
    lines = []
    for kind, of_kind in by_kind(rows).items():
        found = ratios(of_kind)
        memory = Errors.of(memory_pairs(of_kind)["allocated"])
        if found and memory:
            times = [
                f"{each:.2f}" for each in (statistics.geometric_mean(found), min(found), max(found))
            ]
            lines.append([kind, str(len(of_kind)), *times, f"{memory.worst:.3%}"])
    return Table("Predictions by kind", _HEAD, lines) if lines else None
