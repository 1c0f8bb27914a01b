"""What rows come to: errors of memory by lever, intervals, ranks of step times, utilisation. Numbers only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.estimate_space import spearman
from benchmarks.gpu.measured import has_both
from benchmarks.gpu.store import Row


@dataclass(frozen=True)
class Errors:
    """Relative errors without their sign. `bias` is the median with it: above 0 where too much is predicted."""

    count: int
    median: float
    p90: float
    worst: float
    bias: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[float | None, float | None]]) -> Errors | None:
        """From (predicted, measured), those left out where one is missing; None where none is left."""
        signed = [predicted / seen - 1 for predicted, seen in pairs if predicted and seen]
        if not signed:
            return None
        sizes = sorted(map(abs, signed))
        return cls(
            len(sizes),
            statistics.median(sizes),
            percentile(sizes, 0.9),
            sizes[-1],
            statistics.median(signed),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ordered values that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def memory_pairs(rows: Iterable[Row]) -> dict[str, list[tuple[float | None, float | None]]]:
    """(predicted, measured) bytes of each row, of tensors and of what the caching allocator holds."""
    found: dict[str, list[tuple[float | None, float | None]]] = {"allocated": [], "reserved": []}
    for row in filter(has_both, rows):
        peak, estimate = row["measurement"]["peak_bytes"], row["estimate"]
        for name, pairs in found.items():
            pairs.append((estimate[f"{name}_bytes"], peak[name]))
    return found


@dataclass(frozen=True)
class Intervals:
    """How often what was measured lies in the predicted interval, and how wide that is, as a share of what was seen."""

    count: int
    hit: float
    width_median: float
    width_worst: float
    above: int
    below: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Intervals | None:
        """Of the device's total; on a CPU of the tensors."""
        seen = [_interval(row) for row in rows if has_both(row)]
        if not seen:
            return None
        widths = [(high - low) / held for low, high, held in seen]
        above, below = (
            sum(held > high for _, high, held in seen),
            sum(held < low for low, _, held in seen),
        )
        hit = 1 - (above + below) / len(seen)
        return cls(len(seen), hit, statistics.median(widths), max(widths), above, below)


def _interval(row: Row) -> tuple[float, float, float]:
    interval, peak = row["estimate"]["device_bytes"], row["measurement"]["peak_bytes"]
    return interval["low"], interval["high"], peak["device"] or peak["allocated"]


def by_lever(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows with both figures: all of them, then by technique, by model, and by lever."""
    both = [row for row in rows if has_both(row)]
    groups: dict[str, list[Row]] = {"all": both}
    for part in ("technique", "model", "lever"):
        for row in both:
            groups.setdefault(row[part], []).append(row)
    return groups


def step_pairs(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of a step, where both are known."""
    pairs = []
    for row in filter(has_both, rows):
        predicted, seen = row["estimate"]["step_seconds"], row["measurement"]["step_seconds"]
        if predicted and seen:
            pairs.append((predicted, seen["median"]))
    return pairs


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's; None where there is nothing to rank."""
    predicted, seen = [a for a, _ in pairs], [b for _, b in pairs]
    return (
        spearman(predicted, seen)
        if len(pairs) > 2 and min(len(set(predicted)), len(set(seen))) > 1
        else None
    )


def utilisation(row: Mapping[str, Any]) -> float | None:
    """Measured model FLOPs utilisation: the predicted one, at the measured step time, of the same arithmetic."""
    if not has_both(dict(row)):
        return None
    (pair,) = step_pairs([dict(row)]) or [(None, None)]
    share = row["estimate"]["utilisation"]
    return share * pair[0] / pair[1] if share and pair[0] and pair[1] else None
