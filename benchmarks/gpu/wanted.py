"""The numbers to reach on one card of the H100 or H200 kind, and whether what was seen reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]  # by stage and name


def share(value: float) -> str:
    """As a percentage."""
    return f"{value:.1%}"


@dataclass(frozen=True)
class Wanted:
    """One number: the figure that it is of, its limit, and from which side."""

    text: str
    stage: str
    figure: str
    limit: float
    at_least: bool = False
    shown: Callable[[float], str] = share

    def verdict(self, figures: Figures) -> Verdict:
        """What was seen of it."""
        seen = figures.get(self.stage, {}).get(self.figure)
        reached = (
            None if seen is None else seen >= self.limit if self.at_least else seen <= self.limit
        )
        side = "at least" if self.at_least else "at most"
        return Verdict(
            self.text,
            f"{side} {self.shown(self.limit)}",
            None if seen is None else self.shown(seen),
            reached,
        )


@dataclass(frozen=True)
class Verdict:
    """A number as it is told; `reached` is None where nothing was measured."""

    text: str
    wanted: str
    seen: str | None
    reached: bool | None


WANTED = (
    Wanted("memory: median error of allocated", "memory", "allocated median", 0.02),
    Wanted("memory: worst error of allocated", "memory", "allocated worst", 0.08),
    Wanted(
        "memory: device total inside its interval", "memory", "interval hit", 0.95, at_least=True
    ),
    Wanted("memory: width of the widest interval", "memory", "interval width worst", 0.10),
    Wanted(
        "search at 24 GiB: slower than the fastest measured afterwards", "search", "regret", 0.02
    ),
    Wanted(
        "search at 24 GiB: time",
        "search",
        "search seconds",
        300.0,
        shown=lambda value: f"{value:.0f} s",
    ),
    Wanted(
        "search at 24 GiB: out-of-memory probes",
        "search",
        "out of memory",
        2,
        shown=lambda value: f"{value:.0f}",
    ),
    Wanted(
        "throughput over the best micro-batch-only peer, 8B LoRA",
        "peers",
        "over the best peer",
        1.3,
        at_least=True,
        shown=lambda value: f"x {value:.2f}",
    ),
    Wanted(
        "model FLOPs utilisation, 1.5B full in bf16", "speed", "utilisation", 0.45, at_least=True
    ),
    Wanted("train.py against the probe, either way", "loop", "train.py off by", 0.02),
)


def verdicts(figures: Figures) -> list[Verdict]:
    """All of them."""
    return [each.verdict(figures) for each in WANTED]
