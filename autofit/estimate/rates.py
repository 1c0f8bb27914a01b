"""Rates: how fast a device computes, reads its memory and copies to its host; measured here or from
the catalogue."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autofit.core.files import cache_file, digest, read_cache, write_cache
from autofit.core.hardware import MIB, Hardware
from autofit.hardware.catalogue import Card, card_like
from autofit.hardware.dispatch import OPERATORS, chain

# The share of a card's data sheet that large bf16 products reach. A100, H100 (the H200 is the
# same), GH200, B200 and MI300X: Bekman, "Maximum Achievable Matmul FLOPS" (stas00/ml-engineering);
# A10G, L4, L40S and RTX 6000 Ada: mag-/gpu_benchmark; V100 and A6000:
# fanghostt/transformers-benchmarks. Each is the best of many shapes.
_REACHED = {
    **dict.fromkeys(("a100-40gb", "a100-80gb"), 0.87),
    **dict.fromkeys(("h100", "h200"), 0.80),
    **dict.fromkeys(("l4", "rtx-6000-ada", "v100-16gb", "v100-32gb"), 0.76),
    "gh200": 0.84,
    "b200": 0.78,
    "mi300x": 0.51,
    "a10g": 1.0,
    "l40s": 0.70,
    "a6000": 0.63,
}
# GeForce cards clock above their sheet: 1.10 of it on an RTX 3090, 1.08 on a 4090
# (mag-/gpu_benchmark), 1.21 on a 5090 (xzwgit/gpu-flops-bench), for as long as a benchmark runs;
# the sheet is assumed for as long as training does.
_REACHED_BY_GEFORCE = 1.0
_REACHED_BY_OTHERS = 0.75  # what torch assumes of all cards (torch/utils/_runtime_estimation.py)
# Of that, what products of a training reach for hours, when power and heat lower the clocks:
# between steps published by PyTorch's own engineers (1.0) and those of a cloud (0.9), as
# benchmarks/published_speed compares them.
_SUSTAINED = 0.95
# Without matrix units: 0.70 on an RTX 4090, 0.79 on a 5090 and an H200 NVL (gpu-flops-bench).
_REACHED_IN_FP32 = 0.75
_FP8_TO_BF16 = 0.9  # of their shares: 0.88 on an H100, 0.93 on a GH200, 0.98 on a B200 (Bekman)
# By PyTorch's elementwise kernels: what fms-acceleration's steps on an A100 took longer without
# fused ones. Copies of large tensors reach more: 0.91 on an RTX 4090 (krrishnarraj/clpeak#106).
_REACHED_BANDWIDTH = 0.78
# The share of the rate of large products that attention reaches, in (forward, backward), at some
# thousand tokens with a causal mask, whose upper half is skipped: FlashAttention-2 on an A100 a
# tenth below its best (0.73 and 0.63 of the sheet without mask, arXiv 2307.08691), on Hopper 0.35
# of the sheet (370 TFLOP/s, arXiv 2407.08608, which also has 600 of cuDNN's forward); cutlass' and
# cuDNN's backward, and both on other cards: guesses from these.
_ATTENTION = {
    "flash": (0.66, 0.56),
    "efficient": (0.45, 0.30),
    "cudnn": (0.70, 0.58),
}
_ON_HOPPER = {"flash": (0.42, 0.35)}
_HERE = "measured on this machine"
_FORM = 5  # of what is cached: one more whenever something else is measured
_PASS = 1e-5  # seconds: seen on a server's processor
# Seconds that the host takes for one operator of PyTorch, eagerly: the middle of 5 to 25
# microseconds (jiahuanglin.xyz, "From PyTorch op to kernel launch").
_LAUNCH = 15e-6
# Of a host that was measured, how many times longer than a small addition on the processor itself
# it takes to launch an operator on a card, and to pass one through a dispatch mode: in the virtual
# machine of an H200 an addition took 6.0 microseconds, and steps that waited for launches were as
# long as 25 and 30 make them (benchmarks/results/gpu).
_LAUNCHES = 4.2
_PASSES = 5.0
_NAMES = {
    "fp32": "float32",
    "tf32": "tf32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
    "int8": "int8",
}
SIZE = 1024  # of the square products that are measured
_COPIED = 64 * MIB  # larger than the caches of processors that have no memory of their own


@dataclass(frozen=True)
class Rates:
    """What a device reaches.

    Attributes:
        matmul: floating-point operations per second of large products, by the name of the format.
        bandwidth: bytes per second of its memory.
        link: bytes per second to and from the host.
        launch_seconds: of one operator, however small.
        source: where the figures are from.
        peak: `matmul` by the data sheet; None: unknown.
        pass_seconds: of one operator, views too, in each of the two modes of selective
            checkpointing.
        operators: by call, by operator and number format, and by operator: (seconds whatever the
            size, factor of the roofline's seconds); None: not measured.
        kernels: of a card, by operator: factor of the roofline's seconds.
    """

    matmul: Mapping[str, float]
    bandwidth: float
    link: float
    launch_seconds: float
    source: str
    peak: Mapping[str, float] | None = None
    pass_seconds: float = _PASS
    operators: Mapping[str, tuple[float, float]] | None = None
    kernels: Mapping[str, float] | None = None

    @property
    def measured_here(self) -> bool:
        """Whether they were measured on this machine, so that its operators can be too."""
        return self.source == _HERE


# For an unknown device: an A100's, so that configs can at least be ranked, and fp8 at twice bf16,
# as on every card that has it.
UNKNOWN = Rates(
    matmul={
        "float32": 16e12,
        "tf32": 125e12,
        **dict.fromkeys(("bfloat16", "float16"), 250e12),
    }
    | dict.fromkeys(("float8", "int8"), 500e12),
    bandwidth=1.8e12,
    link=25e9,
    launch_seconds=_LAUNCH,
    source="unknown device",
)


def rate_of(rates: Mapping[str, float], dtype: str) -> float:
    """The rate of products in a format; float32's if it has none."""
    name = format_of(dtype)
    if name in rates:
        return rates[name]

    return rates.get("float32", min(rates.values()))


def format_of(dtype: str) -> str:
    """The name of a format in rates: float8_e4m3fn and its relatives are multiplied alike."""
    if dtype.startswith("float8"):
        return "float8"
    return dtype


def rates_of(card: Card) -> Rates:
    """The rates that a card of the catalogue is assumed to reach."""
    sheet = card.flops_per_second
    return Rates(
        matmul={_NAMES[kind]: rate * _reached(card, kind) for kind, rate in sheet.items()},
        bandwidth=card.bandwidth * _REACHED_BANDWIDTH,
        link=card.link,
        launch_seconds=_LAUNCH,
        source=f"catalogue: {card.title}",
        peak={_NAMES[kind]: rate for kind, rate in sheet.items()},
        kernels=_kernels(card),
    )


def _kernels(card: Card) -> dict[str, float]:
    """How many times longer than the roofline says kernels of PyTorch take."""
    shares = dict(_ATTENTION)
    if card.capability[0] == 9:
        shares |= _ON_HOPPER

    factors = {}
    for name, (forward, backward) in shares.items():
        operator = f"aten::_scaled_dot_product_{name}_attention"
        factors[operator] = 1 / forward
        factors[f"{operator}_backward"] = 1 / backward

    return factors


def _reached(card: Card, kind: str) -> float:
    """The share of a card's data sheet that large products in a format reach."""
    if kind == "fp32":
        return _REACHED_IN_FP32

    if card.name in _REACHED:
        share = _REACHED[card.name] * _SUSTAINED
    elif "GeForce" in card.title:
        share = _REACHED_BY_GEFORCE
    else:
        share = _REACHED_BY_OTHERS * _SUSTAINED

    if kind == "fp8":
        share *= _FP8_TO_BF16

    return share


def rates_for(hardware: Hardware) -> Rates | None:
    """The rates of a device: measured for this machine's CPU, the catalogue's for a GPU beside the
    host that it was detected with; None for an unknown one."""
    if hardware.device == "cpu":
        return _cached(hardware)

    card = card_like(hardware)
    if card is None:
        return None

    rates = rates_of(card)
    if hardware.host_link is not None:
        rates = replace(rates, link=hardware.host_link)
    if hardware.dispatch_seconds is None:
        return rates

    return replace(
        rates,
        launch_seconds=_LAUNCHES * hardware.dispatch_seconds,
        pass_seconds=_PASSES * hardware.dispatch_seconds,
    )


def measure(seconds: float = 0.5, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Measure this machine's CPU for about that long, once it is warm, each task once per round;
    the shortest times count, which other work disturbs least."""
    products = {
        "float32": torch.ones(SIZE, SIZE, dtype=torch.float32),
        "bfloat16": torch.ones(SIZE, SIZE, dtype=torch.bfloat16),
    }
    source = torch.ones(_COPIED // 4)
    target = torch.empty(_COPIED // 4)
    small = torch.ones(8)

    tasks: dict[str, Callable[[], object]] = {
        **{name: partial(torch.matmul, matrix, matrix) for name, matrix in products.items()},
        "copy": lambda: target.copy_(source),
        "launch": lambda: chain(small.clone().requires_grad_()).sum().backward(),
        "small": lambda: chain(small),
        "pass": lambda: _passed(small),
    }

    # The first of each imports and makes what the others find, for a second.
    for task in tasks.values():
        task()

    times: dict[str, list[float]] = {name: [] for name in tasks}
    start = clock()
    while not all(times.values()) or clock() - start < seconds:
        for name, task in tasks.items():
            began = clock()
            task()
            times[name].append(max(clock() - began, 1e-9))

    took = {name: min(seconds) for name, seconds in times.items()}
    bandwidth = 2 * _COPIED / took["copy"]

    return Rates(
        matmul={name: 2 * SIZE**3 / took[name] for name in products},
        bandwidth=bandwidth,
        link=bandwidth,
        launch_seconds=took["launch"] / (2 * OPERATORS),
        pass_seconds=max(took["pass"] - 2 * took["small"], 0.0) / (2 * OPERATORS),
        source=_HERE,
    )


def _passed(small: torch.Tensor) -> None:
    """A forward that saves nothing, and its recomputation."""
    modes = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    for mode in modes:
        with mode:
            chain(small)


def _cached(hardware: Hardware) -> Rates:
    """Measured once per machine, version of PyTorch and number of threads."""
    facts = (
        _FORM,
        hardware.name,
        hardware.cores,
        torch.get_num_threads(),
        torch.__version__,
    )
    path = cache_file("rates", f"{digest(repr(facts))}.json")
    found: Rates | None = read_cache(path, Rates)
    if found is not None:
        return found

    rates = measure()
    write_cache(path, asdict(rates))

    return rates
