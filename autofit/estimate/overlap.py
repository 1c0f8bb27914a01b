"""How long a sharded forward and backward take: computation and collectives side by side, in the
order of FSDP2.

While a group of weights computes, the next one is gathered, and what the one before has reduced is
sent behind it; all collectives of a group of ranks queue up one after the other (fully_shard:
implicit prefetching in the forward, explicit in the backward, _fsdp_param_group.py). Seconds may be
arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autofit.estimate.roofline import Speed

# How much slower products run beside a collective, as a share of its time: NCCL's kernels hold 16
# to 32 of some 108 to 132 multiprocessors, and share the memory's bandwidth.
_SLOWED = 0.15
# Operators that take the host as long as DTensor's Python around a collective that split layers
# wait for: on two cores 1.2 ms of CPU time for each, where an operator took 4.8 us (a small Llama,
# tensor_parallel 2 beside ddp).
_REDISTRIBUTING = 250
_SETTLED = 4  # rounds of equal units after which each takes as long as the one before
Seconds = Any  # a number or an array of them


@dataclass(frozen=True)
class Unit:
    """A group of weights that are gathered together, in a forward or a backward: seconds of a
    micro-batch."""

    computing: Seconds
    waited: Seconds = 0.0  # for what split layers exchange
    gather: Seconds = 0.0  # before it, unless the weights stayed
    reduce: Seconds = 0.0  # after a backward


Runs = Sequence[tuple[Sequence[Unit], int]]  # units in a row, and how often


class _Clock(NamedTuple):
    """When the link and the device are free, when the next gathering may start, and the seconds of
    what is reduced once the gathering that was issued before is through."""

    link: Seconds = 0.0
    issued: Seconds = 0.0
    done: Seconds = 0.0
    waiting: Seconds = 0.0


def micro_batch(forward: Runs, backward: Runs) -> Seconds:
    """The seconds of a forward and a backward."""
    clock = _through(
        _Clock(),
        forward,
        _forward,
    )
    clock = _through(
        clock._replace(issued=clock.done),
        backward,
        _backward,
    )

    return np.maximum(
        clock.done,
        np.maximum(clock.link, clock.done) + clock.waiting,
    )


def _through(clock: _Clock, runs: Runs, after: Callable[[_Clock, Unit], _Clock]) -> _Clock:
    for units, repeats in runs:
        before = clock
        for _ in range(min(repeats, _SETTLED)):
            before = clock
            for unit in units:
                clock = after(clock, unit)

        left = max(0, repeats - _SETTLED)
        link, issued, done = (
            here + left * (here - there) for here, there in zip(clock[:3], before[:3], strict=True)
        )

        clock = _Clock(
            link,
            issued,
            done,
            clock.waiting,
        )

    return clock


def _forward(clock: _Clock, unit: Unit) -> _Clock:
    gathered = np.maximum(clock.link, clock.issued) + unit.gather
    issued = np.maximum(gathered, clock.done)

    return _Clock(
        gathered,
        issued,
        issued + _slowed(unit.computing + unit.waited, unit.gather),
    )


def _backward(clock: _Clock, unit: Unit) -> _Clock:
    gathered = np.maximum(clock.link, clock.issued) + unit.gather
    issued = np.maximum(gathered, clock.done)
    done = issued + _slowed(unit.computing + unit.waited, unit.gather + unit.reduce)

    return _Clock(
        np.maximum(gathered, clock.done) + clock.waiting,
        issued,
        done,
        unit.reduce,
    )


def one_after_another(forward: Runs, backward: Runs) -> Seconds:
    """The same where what computes also sends, as a process on a CPU: gloo copies and adds on the
    cores of its rank."""
    of_units = (
        (e.computing, e.waited, e.gather, e.reduce, n)
        for run, n in (*forward, *backward)
        for e in run
    )

    return sum(repeats * sum(seconds) for *seconds, repeats in of_units)


def redistributing(speed: Speed) -> float:
    """The seconds that a CPU takes around each collective that layers wait for; another device's
    host runs ahead."""
    return 0.0 if speed.asynchronous else _REDISTRIBUTING * speed.rates.launch_seconds


def _slowed(computing: Seconds, exchanging: Seconds) -> Seconds:
    """The seconds of a computation while collectives run for so long."""
    return computing + _SLOWED * np.minimum(computing, exchanging)
