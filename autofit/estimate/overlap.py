"""How long a sharded forward and backward take: computation and collectives side by side, in the order of FSDP2.

While a group of weights computes, the next one is gathered, and what the one before has reduced is sent behind it; all
collectives of a group of ranks queue up one after the other (fully_shard: implicit prefetching in the forward, explicit
in the backward, _fsdp_param_group.py). Seconds may be arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.estimate.roofline import Speed

# How much slower products run beside a collective, as a share of its time: NCCL's kernels hold 16 to 32 of some 108
# to 132 multiprocessors, and share the memory's bandwidth.
_SLOWED = 0.15
# Operators that take the host as long as DTensor's Python around a collective that split layers wait for: on two cores
# 1.2 ms of CPU time for each, where an operator took 4.8 us (a small Llama, tensor_parallel 2 beside ddp).
_REDISTRIBUTING = 250
Seconds = Any  # a number or an array of them


@dataclass(frozen=True)
class Unit:
    """A group of weights that are gathered together: seconds of a micro-batch."""

    forward: Seconds
    backward: Seconds
    waited: tuple[Seconds, Seconds] = (0.0, 0.0)  # in the forward and the backward, for what split layers exchange
    gather: Seconds = 0.0  # before its forward
    again: Seconds = 0.0  # before its backward, unless it stayed
    reduce: Seconds = 0.0  # after its backward


def micro_batch(units: Sequence[Unit], *, reduced: bool = True) -> Seconds:
    """The seconds of a forward and a backward. `reduced`: gradients are, as in the last micro-batch of a step."""
    link = issued = done = 0.0  # when the link and the device are free, and when the next gathering may start
    for unit in units:
        link = gathered = np.maximum(link, issued) + unit.gather
        issued = np.maximum(gathered, done)
        done = issued + _slowed(unit.forward + unit.waited[0], unit.gather)
    issued = done
    waiting: Seconds = None  # what is reduced once the gathering that was issued before is through
    for unit in reversed(units):
        link = gathered = np.maximum(link, issued) + unit.again
        if waiting is not None:
            link = np.maximum(link, done) + waiting
        issued = np.maximum(gathered, done)
        waiting = unit.reduce if reduced else 0.0
        done = issued + _slowed(unit.backward + unit.waited[1], unit.again + waiting)
    return np.maximum(done, np.maximum(link, done) + waiting)


def one_after_another(units: Sequence[Unit]) -> Seconds:
    """The same where what computes also sends, as a process on a CPU: gloo copies and adds on the cores of its rank."""
    return sum(sum((e.forward, e.backward, *e.waited, e.gather, e.again, e.reduce)) for e in units)


def redistributing(speed: Speed) -> float:
    """The seconds that a CPU takes around each collective that layers wait for; another device's host runs ahead."""
    return 0.0 if speed.asynchronous else _REDISTRIBUTING * speed.rates.launch_seconds


def _slowed(computing: Seconds, exchanging: Seconds) -> Seconds:
    """The seconds of a computation while collectives run for so long."""
    return computing + _SLOWED * np.minimum(computing, exchanging)


def beside(computing: Seconds, exchanging: Seconds, *, asynchronous: bool = True) -> Seconds:
    """The seconds of one of many groups in a row, that computes while others exchange for so long; on CPUs one waits
    for the other."""
    if not asynchronous:
        return computing + exchanging
    return np.maximum(_slowed(computing, exchanging), exchanging)
