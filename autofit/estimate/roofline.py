"""Seconds from costs: each operator takes as long as its arithmetic or its memory traffic,
whichever is longer.

The roofline of Williams et al. 2009 (doi 10.1145/1498765.1498785), operator by operator. On CUDA a
kernel takes both: what it reads first and writes last lies beside no arithmetic. So do 8192 x 8192
x 8192 products on an A100, whose best shapes reach 271 TFLOP/s, come to the 257 that were measured
of random numbers (Horace He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given
Predictable Data"). And the host launches operators ahead of the device, so launching counts only
where a forward's or backward's takes longer than its work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.knobs.optimizer import COMPILED
from autofit.estimate.operator_costs import Cost
from autofit.estimate.rates import Rates, rate_of
from autofit.estimate.scaling import ONE, UNSCALED, Floats, Grid, Symbols

_ARITHMETIC = ("matmul", "convolution", "attention")
# The share of elementwise operators' traffic left when the compiler fuses them: each chain reads
# its inputs and writes its outputs. An assumption, from a norm or an activation between two
# products: 2 passes instead of 4 to 6.
_FUSED_TRAFFIC = 0.4
# How many operators of PyTorch a call takes the host as long as, where it is more than one:
# bitsandbytes unpacks 4-bit weights by several layers of Python. From steps of a 1.5B model on an
# H200 that waited for them (benchmarks/results/gpu).
_LAUNCHES = {"bitsandbytes::dequantize_4bit": 5}
# The same of a copy to or from the host beside the computation, its memory allocated and freed.
# From steps of an 8B model in 4 bits there, whose streamed weights took 49 ms longer a micro-batch,
# though the link was never full.
LAUNCHES_OF_COPY = 5
# Seconds for which a device waits at a call, whatever its size: before each product bitsandbytes
# asks it whether inputs hold outliers. From steps of an 8B model in int8 on an H200
# (benchmarks/results/gpu): 0.8 to 1.1 ms for each forward of a layer, with one and two samples,
# with a slow and a faster host, and once more where blocks are recomputed. Asking alone does not
# take that long; what else does is not known.
STALLS = {"aten::_int_mm": 0.9e-3}


@dataclass(frozen=True)
class Speed:
    """How fast a device runs the operators of a config."""

    rates: Rates
    asynchronous: bool  # the host launches operators ahead (CUDA)
    tf32: bool = False
    compiled: bool = False

    @classmethod
    def of(cls, rates: Rates, hardware: Hardware, config: Config) -> Self:
        """The speed of a config's forwards and backwards."""
        tf32 = config.precision == "tf32"
        compiled = config.compile != "none"

        return cls(
            rates,
            hardware.device == "cuda",
            tf32,
            compiled,
        )

    @classmethod
    def of_update(cls, rates: Rates, hardware: Hardware, config: Config) -> Self:
        """The speed of a config's optimizer step, which some optimizers compile."""
        asynchronous = hardware.device == "cuda"
        compiled = config.optimizer in COMPILED

        return cls(
            rates,
            asynchronous,
            compiled=asynchronous and compiled,
        )

    def measured(self, call: str, operator: str) -> tuple[float, float]:
        """(seconds whatever the size, factor of the roofline's seconds); (0, 1) if not measured."""
        name = operator.partition(" ")[0]
        if self.asynchronous:
            return STALLS.get(name, 0.0), (self.rates.kernels or {}).get(name, 1.0)

        measured = self.rates.operators or {}
        fixed, factor = (
            measured.get(call) or measured.get(operator) or measured.get(name) or (0.0, 1.0)
        )

        return fixed, factor

    def launches(self, operator: str) -> int:
        """How many operators the host takes as long for as for this one; measured ones have their
        own time."""
        return _LAUNCHES.get(operator.partition(" ")[0], 1) if self.asynchronous else 1

    def flops_per_second(self, kind: str, dtype: str) -> float:
        """The arithmetic rate of one kind of operator in one format."""
        if kind not in _ARITHMETIC:
            dtype = "float32"
        elif dtype == "float32" and self.tf32:
            dtype = "tf32"

        return rate_of(self.rates.matmul, dtype)


def passes_of(config: Config, phase: str) -> int:
    """How often each operator of a forward passes through a dispatch mode of Python.

    Selective checkpointing saves or drops each result by one mode, and looks up what was saved by
    another.
    """
    selective = config.activation_checkpointing.endswith("selective")
    return 2 if phase == "forward" and selective else 0


@dataclass(frozen=True)
class Work:
    """Operators, as arrays of [operators, pairs of a grid]; `dispatched` counts all that were
    called, views too."""

    kinds: tuple[tuple[str, str], ...]
    calls: tuple[tuple[str, str], ...]  # (the call, its operator)
    flops: Floats
    nbytes: Floats
    dispatched: int

    @classmethod
    def of(
        cls,
        costs: Sequence[Cost],
        grid: Grid,
        symbols: Symbols,
        dispatched: int = 0,
    ) -> Self:
        """The work of these operators at each pair of a grid."""
        flops = grid.amounts(
            (cost.flops for cost in costs),
            symbols,
        )
        indices = np.repeat(
            np.arange(len(costs)),
            [len(cost.sizes) for cost in costs],
        )
        nbytes = np.zeros_like(flops)
        np.add.at(
            nbytes,
            indices,
            grid.amounts((size for cost in costs for size in cost.sizes), symbols),
        )
        kinds = tuple((cost.kind, cost.dtype) for cost in costs)

        return cls(
            kinds,
            tuple((cost.call, cost.operator) for cost in costs),
            flops,
            nbytes,
            dispatched,
        )

    def seconds(self, speed: Speed, *, passes: int = 0) -> dict[str, Floats]:
        """How long they take together, by what they wait for: compute, memory, transfer or launch,
        which a host that runs ahead is done with meanwhile.

        Args:
            passes: how often each dispatched operator passes through a dispatch mode of Python.
        """
        rates = speed.rates
        totals = {
            name: np.zeros(self.flops.shape[1])
            for name in ("compute", "memory", "transfer", "launch")
        }
        if not self.kinds:
            return totals

        elementwise = np.array([kind == "memory" for kind, _ in self.kinds])[:, None]

        # What the host computes instead of the device reads and writes its memory, about as fast as
        # the link.
        moving = np.array([kind in ("transfer", "host") for kind, _ in self.kinds])[:, None]
        fused = np.where(elementwise & speed.compiled, _FUSED_TRAFFIC, 1.0)

        arithmetic = (
            self.flops / np.array([speed.flops_per_second(*kind) for kind in self.kinds])[:, None]
        )
        traffic = self.nbytes / np.where(moving, rates.link, rates.bandwidth) * fused
        fixed, factor = np.array([speed.measured(*call) for call in self.calls]).T[:, :, None]

        if speed.asynchronous:
            work = (arithmetic + traffic) * factor + fixed
        else:
            work = np.maximum(arithmetic, traffic) * factor + fixed

        launches = np.array([speed.launches(operator) for _, operator in self.calls])[:, None]
        passing = passes * rates.pass_seconds * self.dispatched / len(self.kinds)
        launch = rates.launch_seconds * launches * fused + passing

        totals["compute"] = np.where(arithmetic >= traffic, work, 0.0).sum(0)
        totals["memory"] = np.where((arithmetic < traffic) & ~moving, work, 0.0).sum(0)
        totals["transfer"] = np.where((arithmetic < traffic) & moving, work, 0.0).sum(0)
        totals["launch"] = (launch + 0.0 * work).sum(0)

        return totals


def waits_of(
    costs: Sequence[Cost],
    speed: Speed,
    *,
    dispatched: int = 0,
    passes: int = 0,
    overlapping: bool = False,
) -> dict[str, float]:
    """The seconds of operators as they were traced, by what they wait for; as `Work.seconds`, but
    for launching that is done meanwhile.

    Args:
        overlapping: transfers are beside the rest, as in a forward and a backward.
    """
    seconds = Work.of(costs, ONE, UNSCALED, dispatched).seconds(speed, passes=passes)
    waits = {name: float(found[0]) for name, found in seconds.items()}
    if speed.asynchronous:
        copies = sum(cost.kind == "transfer" for cost in costs) if overlapping else 0
        launch = waits.pop("launch") + (LAUNCHES_OF_COPY - 1) * copies * speed.rates.launch_seconds
        working = (
            max(waits["transfer"], waits["compute"] + waits["memory"])
            if overlapping
            else sum(waits.values())
        )
        waits["launch"] = max(launch - working, 0.0)

    return waits


def working_seconds(cost: Cost, speed: Speed) -> float:
    """The seconds of one operator by arithmetic and traffic alone."""
    return sum(seconds for name, seconds in waits_of([cost], speed).items() if name != "launch")
