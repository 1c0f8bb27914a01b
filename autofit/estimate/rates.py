"""Rates: how fast a device computes, reads its memory and talks to its host. Measured here, or from the catalogue."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autofit.core.files import cache_file, digest, write_cache
from autofit.core.hardware import MIB, Hardware
from autofit.hardware.catalogue import Card, card_like

# What of a card's sheet large bf16 products were measured to reach. A100, H100 (the H200 is the same), GH200, B200 and
# MI300X: Bekman, "Maximum Achievable Matmul FLOPS" (stas00/ml-engineering); A10G, L4, L40S and RTX 6000 Ada:
# mag-/gpu_benchmark; V100 and A6000: fanghostt/transformers-benchmarks. Each is the best of many shapes.
_REACHED = {
    "a100-40gb": 0.87,
    "a100-80gb": 0.87,
    "h100": 0.80,
    "h200": 0.80,
    "gh200": 0.84,
    "b200": 0.78,
    "mi300x": 0.51,
    "a10g": 1.0,
    "l4": 0.76,
    "l40s": 0.70,
    "rtx-6000-ada": 0.76,
    "v100-16gb": 0.76,
    "v100-32gb": 0.76,
    "a6000": 0.63,
}
# GeForce cards clock above their sheet: 1.10 of it on an RTX 3090, 1.08 on a 4090 (mag-/gpu_benchmark), 1.21 on a 5090
# (xzwgit/gpu-flops-bench), for as long as a benchmark runs; the sheet is assumed for as long as training does.
_REACHED_BY_GEFORCE = 1.0
_REACHED_BY_OTHERS = 0.75  # what torch assumes of all cards (torch/utils/_runtime_estimation.py)
_REACHED_IN_FP32 = 0.75  # without matrix units: 0.70 on an RTX 4090, 0.79 on a 5090 and an H200 NVL (gpu-flops-bench)
_FP8_TO_BF16 = 0.9  # of their shares: 0.88 on an H100, 0.93 on a GH200, 0.98 on a B200 (Bekman)
_REACHED_BANDWIDTH = 0.9  # 0.91 was measured on an RTX 4090 (krrishnarraj/clpeak#106); taken for all cards alike
_HERE = "measured on this machine"
_FORM = 3  # of what is kept: one more whenever something else is measured
_OPERATORS = 100  # in a row, to measure what one costs
_PASS = 1e-5  # seconds: seen on a server's processor
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
        pass_seconds: what one operator, a view too, costs more where a mode of selective checkpointing stands in its
            way: for each of both modes.
        operators: of single calls, and of operators (seconds whatever the size, how many times longer than these
            rates say for all that it adds); None: not known (yet).
        peak: the most that `matmul` could be by the maker's word, by format; what is reached where that is not known.
        source: where the figures are from.
    """

    matmul: Mapping[str, float]
    bandwidth: float
    link: float
    launch_seconds: float
    source: str
    peak: Mapping[str, float] | None = None
    pass_seconds: float = _PASS
    operators: Mapping[str, Sequence[float]] | None = None

    @property
    def measured_here(self) -> bool:
        """Whether they were measured on this machine, so that its operators can be too."""
        return self.source == _HERE


# For a device that nothing is known of: an A100's, so that configs can at least be ranked, and fp8 at twice bf16, as on
# every card that has it; those that have not are never asked for it.
UNKNOWN = Rates(
    matmul={
        "float32": 16e12,
        "tf32": 125e12,
        "bfloat16": 250e12,
        "float16": 250e12,
        "float8": 500e12,
        "int8": 500e12,
    },
    bandwidth=1.8e12,
    link=25e9,
    launch_seconds=_LAUNCH,
    source="unknown device",
)


def rate_of(known: Mapping[str, float], dtype: str) -> float:
    """The rate of products in a format, of those known; one that nothing is known of is taken for float32."""
    name = format_of(dtype)
    return known[name] if name in known else known.get("float32", min(known.values()))


def format_of(dtype: str) -> str:
    """What rates call a format: float8_e4m3fn and its relatives are multiplied alike."""
    return "float8" if dtype.startswith("float8") else dtype


def rates_of(card: Card) -> Rates:
    """What a card of the catalogue is taken to reach."""
    peak = {_NAMES[kind]: rate for kind, rate in card.flops_per_second.items()}
    return Rates(
        matmul={_NAMES[kind]: rate * _reached(card, kind) for kind, rate in card.flops_per_second.items()},
        bandwidth=card.bandwidth * _REACHED_BANDWIDTH,
        link=card.link,
        launch_seconds=_LAUNCH,
        source=f"catalogue: {card.title}",
        peak=peak,
    )


def _reached(card: Card, kind: str) -> float:
    """The share of a card's sheet that large products in a format reach."""
    if kind == "fp32":
        return _REACHED_IN_FP32
    others = _REACHED_BY_GEFORCE if "GeForce" in card.title else _REACHED_BY_OTHERS
    return _REACHED.get(card.name, others) * (_FP8_TO_BF16 if kind == "fp8" else 1.0)


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
        "launch": lambda: _chain(small.clone().requires_grad_()).sum().backward(),
        "small": lambda: _chain(small),
        "pass": lambda: _passed(small),
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
        launch_seconds=took["launch"] / (2 * _OPERATORS),
        pass_seconds=max(took["pass"] - 2 * took["small"], 0.0) / (2 * _OPERATORS),
        source=_HERE,
    )


def _chain(small: torch.Tensor) -> torch.Tensor:
    for _ in range(_OPERATORS):
        small = small.add(1)
    return small


def _passed(small: torch.Tensor) -> None:
    """A forward that keeps nothing, and the same computed again."""
    for mode in create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE):
        with mode:
            _chain(small)


def _product(matrix: torch.Tensor) -> Callable[[], object]:
    return lambda: matrix @ matrix


def _kept(hardware: Hardware) -> Rates:
    """Measured once for a machine, version of PyTorch and number of threads."""
    facts = (_FORM, hardware.name, hardware.cores, torch.get_num_threads(), torch.__version__)
    path = cache_file("rates", f"{digest(repr(facts))}.json")
    try:
        return Rates(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none yet, or of another version
        rates = measure()
    write_cache(path, json.dumps(asdict(rates)))
    return rates
