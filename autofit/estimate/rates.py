"""Rates: how fast a device computes, reads its memory and talks to its host. Measured here, or from the catalogue."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autofit.core.hardware import MIB, Hardware
from autofit.core.run_directory import write_whole
from autofit.memory.catalogue import Card, card_like

# What of a card's peak large products and copies reach. Published by those who measured it: 80 to 87 % for products on
# A100 and H100 (Bekman, "Maximum Achievable Matmul FLOPS"), and about 90 % for copies. Taken for all cards alike.
_REACHED_COMPUTE, _REACHED_BANDWIDTH = 0.8, 0.9
_LAUNCH = 6e-6  # seconds: what the host takes for one operator of PyTorch, eagerly, on a server's processor
_NAMES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8", "int8": "int8"}
_SIZE = 1024  # of the square products that are measured
_COPIED = 64 * MIB  # larger than the caches of processors that have no memory of their own


@dataclass(frozen=True)
class Rates:
    """What a device reaches.

    Attributes:
        matmul: floating-point operations per second of large products, by the name of the format.
        bandwidth, link: bytes per second of its memory, and to and from the host.
        launch_seconds: what one operator costs however small it is.
        peak: the most that `matmul` could be by the maker's word, by format; what is reached where that is not known.
        source: where the figures are from.
    """

    matmul: Mapping[str, float]
    bandwidth: float
    link: float
    launch_seconds: float
    source: str
    peak: Mapping[str, float] | None = None


# For a device that nothing is known of: an A100's, so that configs can at least be ranked.
UNKNOWN = Rates(
    matmul={"float32": 16e12, "tf32": 125e12, "bfloat16": 250e12, "float16": 250e12, "int8": 500e12},
    bandwidth=1.8e12,
    link=25e9,
    launch_seconds=_LAUNCH,
    source="unknown device",
)


def rates_of(card: Card) -> Rates:
    """What a card of the catalogue is taken to reach."""
    peak = {_NAMES[kind]: rate for kind, rate in card.flops_per_second.items()}
    return Rates(
        matmul={name: rate * _REACHED_COMPUTE for name, rate in peak.items()},
        bandwidth=card.bandwidth * _REACHED_BANDWIDTH,
        link=card.link,
        launch_seconds=_LAUNCH,
        source=f"catalogue: {card.title}",
        peak=peak,
    )


def rates_for(hardware: Hardware) -> Rates | None:
    """The rates of a device: measured for the CPU at hand, the catalogue's for a GPU; None for an unknown one."""
    if hardware.device == "cpu":
        return _kept(hardware)
    card = card_like(hardware)
    return rates_of(card) if card else None


def measure(seconds: float = 2.0, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Measure the CPU at hand for about that long, in rounds that take turns."""
    products = {dtype: torch.ones(_SIZE, _SIZE, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    source, target = torch.ones(_COPIED // 4), torch.empty(_COPIED // 4)
    small = torch.ones(8)
    tasks: dict[str, Callable[[], object]] = {
        **{str(dtype).removeprefix("torch."): _product(matrix) for dtype, matrix in products.items()},
        "copy": lambda: target.copy_(source),
        "launch": lambda: [small.add(1) for _ in range(100)],
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    start = clock()
    while not all(times.values()) or clock() - start < seconds:
        for name, task in tasks.items():
            began = clock()
            task()
            times[name].append(max(clock() - began, 1e-9))
    took = {name: statistics.median(each) for name, each in times.items()}
    bandwidth = 2 * _COPIED / took["copy"]
    return Rates(
        matmul={name: 2 * _SIZE**3 / took[name] for name in ("float32", "bfloat16")},
        bandwidth=bandwidth,
        link=bandwidth,
        launch_seconds=took["launch"] / 100,
        source="measured on this machine",
    )


def _product(matrix: torch.Tensor) -> Callable[[], object]:
    return lambda: matrix @ matrix


def _kept(hardware: Hardware) -> Rates:
    """Measured once for a machine, version of PyTorch and number of threads."""
    facts = (hardware.name, hardware.cores, torch.get_num_threads(), torch.__version__)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "autofit" / "rates" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
    try:
        return Rates(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none yet, or of another version
        rates = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(rates)))
    except OSError:
        return rates  # a cache that cannot be written is no reason to fail
    return rates
