"""The stages of a pipeline: what micro-batches hold that are under way beside the traced one, and
how long a step takes in which stages wait for one another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from autofit.estimate.earlier_micro_batches import Turn, averages_last
from autofit.estimate.recorder import Event
from autofit.estimate.step_trace import Trace
from autofit.training.pipeline import under_way_in


@dataclass(frozen=True)
class FollowedStage:
    """A stage of a pipeline that is followed in a model of its blocks.

    Attributes:
        number: of the stage, from 0.
        kept: the blocks of the whole model that are there: those of the stage, and one in place of
            each row of others.
        cuts: of the model of these.
    """

    number: int
    kept: tuple[int, ...]
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, cuts: Sequence[int], number: int, stages: int) -> Self:
        """One of so many stages of a model with these cuts."""
        kept: list[int] = []
        found = [0]
        stands_for_others = False
        for chunk, (start, stop) in enumerate(pairwise(cuts)):
            if chunk % stages == number:
                kept += range(start, stop)
                stands_for_others = False
            elif not stands_for_others:
                kept.append(start if kept else cuts[number] - 1)
                stands_for_others = True

            found.append(len(kept))

        return cls(number, tuple(kept), tuple(found))


@dataclass(frozen=True)
class Moment:
    """When the backward of a micro-batch runs in a stage, at which it may need most.

    Attributes:
        buffers: how many micro-batches are under way at most: each has a buffer for what it
            receives.
        others: how many of them hold activations now, beside this one.
        ended: how many backwards of the step have ended, or 1 for some.
        drains: no forward comes between the backward before and this one.
        keeps_sent: sends are waited for behind all forwards, and behind all backwards.
    """

    buffers: int
    others: int
    ended: int
    drains: bool = False
    keeps_sent: bool = False

    @property
    def turn(self) -> Turn:
        """Of the micro-batch whose backward runs."""
        if not self.ended:
            return Turn.FIRST

        return Turn.DRAIN if self.drains else Turn.LATER


def moments_of(
    stage: int,
    stages: int,
    micro_batches: int,
    schedule: str,
) -> list[Moment]:
    """The backwards of a step at one of which a stage needs most.

    While all micro-batches are under way no backward has left gradients. Later ones find them, but
    fewer activations; and where sends are waited for at the end, more that was sent.
    """
    is_1f1b = schedule == "1f1b" and micro_batches >= stages
    buffers = under_way_in(stage, stages, micro_batches) if is_1f1b else micro_batches
    if buffers < micro_batches:
        return [Moment(buffers, buffers - 1, 1)]

    found = []
    for ended in sorted({0, 1, micro_batches - 1}):
        if ended < micro_batches:
            others = micro_batches - 1 - ended
            found.append(Moment(buffers, others, ended, ended > 0, keeps_sent=not is_1f1b))

    return found


# The labels of what a micro-batch has for itself; weights and their like have others.
_OWN = (None, "inputs")
_LOSS_BYTES = 4  # of each micro-batch, which the last stage keeps
_GRADIENT_BUFFERS = 2  # of what is received from the stage behind


def with_others_under_way(
    traced: Trace,
    stage: int,
    stages: int,
    at: Moment,
    micro_batches: int,
) -> Trace:
    """A stage's trace that also has what the other micro-batches hold, as its `whole`.

    Each holds what the traced one has made in its forward and still holds when its backward begins,
    and what it has received.

    Args:
        traced: one micro-batch through the stage, which is one of so many.
        at: when its backward runs.
        micro_batches: of a step.
    """
    step = traced.whole or traced
    start = step.start("forward")
    backward = step.start("backward")
    update = step.start("update")
    end = update
    if averages_last(traced.config):  # behind the last gradient, when no other is under way
        completed = [number for number in step.completed.values() if backward <= number <= update]
        end = max(completed, default=update)

    sizes: dict[int, int] = {}
    made: list[int] = []
    for number, event in enumerate(step.events[:backward]):
        if number >= start and event.storage not in sizes:
            made.append(event.storage)

        sizes[event.storage] = event.nbytes

    held = [
        sizes[storage] for storage in made if sizes[storage] and step.labels.get(storage) in _OWN
    ]

    beside = [traced.passed_bytes] * _exchanged(stage, stages, at, micro_batches)
    if stage == stages - 1:
        beside += [_LOSS_BYTES] * (micro_batches - 1)

    storage = 1 + max((event.storage for event in step.events), default=0)
    begun: list[Event] = []
    ended: list[Event] = []
    labels = dict(step.labels)
    for nbytes in held * at.others:
        labels[storage] = "inputs"
        begun.append(Event(storage, nbytes))
        ended.append(Event(storage, 0))
        storage += 1

    for nbytes in beside:
        labels[storage] = "inputs"
        begun.append(Event(storage, nbytes))
        storage += 1

    def moved(number: int) -> int:
        """Where what was before an event is now."""
        return number + len(begun) * (number >= start) + len(ended) * (number >= end)

    whole = replace(
        step,
        events=(
            *step.events[:start],
            *begun,
            *step.events[start:end],
            *ended,
            *step.events[end:],
        ),
        marks=tuple(replace(mark, events=moved(mark.events)) for mark in step.marks),
        completed={storage: moved(number) for storage, number in step.completed.items()},
        products={phase: moved(number) for phase, number in step.products.items()},
        labels=labels,
        reserved={},
        whole=None,
    )

    return replace(traced, whole=whole, reserved={})


def _exchanged(stage: int, stages: int, at: Moment, micro_batches: int) -> int:
    """How many tensors a stage keeps that it exchanges, beside those of the traced micro-batch."""
    count = 0
    if stage > 0:
        count += at.buffers - 1
        count += at.ended if at.keeps_sent else min(at.ended, 1)

    if stage < stages - 1:
        count += min(micro_batches, _GRADIENT_BUFFERS) - 1
        if at.keeps_sent:
            count += at.ended  # with gloo, which keeps what was sent as long as its work
        elif micro_batches - at.buffers > 1:
            count += 1  # with gloo, what was passed on last but one

    return count


def seconds_of_schedule(
    forward: Sequence[float],
    backward: Sequence[float],
    passing: Sequence[float],
    micro_batches: int,
    schedule: str,
    chunks: int = 1,
) -> float:
    """How long all micro-batches of a step take in a pipeline, whose stages wait for one another.

    A forward begins when the stage is free and the stage before has passed on what it needs; a
    backward, when the stage behind has.

    Args:
        forward, backward: seconds of one micro-batch in each stage.
        passing: seconds that an activation or a gradient takes from each stage to the next.
        schedule: "1f1b", "gpipe" or "interleaved".
        chunks: rows of blocks that each stage holds, which take as long as one another.
    """
    stages = len(forward)
    orders = [
        list(order_of(stage, stages, micro_batches, schedule, chunks)) for stage in range(stages)
    ]
    ended: dict[tuple[str, int, int], float] = {}  # by what, chunk and micro-batch
    free = [0.0] * stages
    done = [0] * stages
    from_stage = [*passing, max(passing, default=0.0)]

    def ready(what: str, chunk: int, number: int) -> float | None:
        """When a micro-batch has what it needs; None where that is not known yet."""
        if what == "forward":
            if chunk == 0:
                return 0.0

            before = ended.get((what, chunk - 1, number))
            return None if before is None else before + from_stage[(chunk - 1) % stages]

        if chunk == stages * chunks - 1:
            return ended[("forward", chunk, number)]

        behind = ended.get((what, chunk + 1, number))
        return None if behind is None else behind + from_stage[chunk % stages]

    while any(count < len(order) for count, order in zip(done, orders, strict=True)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                what, chunk, number = order[done[stage]]
                start = ready(what, chunk, number)
                if start is None:
                    break

                of_stage = forward if what == "forward" else backward
                free[stage] = max(free[stage], start) + of_stage[stage] / chunks
                ended[(what, chunk, number)] = free[stage]
                done[stage] += 1

    return max(free)


def order_of(
    stage: int,
    stages: int,
    micro_batches: int,
    schedule: str,
    chunks: int = 1,
) -> Iterator[tuple[str, int, int]]:
    """What a stage does, in which chunk and of which micro-batch, one after the other."""
    rounds = 1
    ahead = micro_batches
    if schedule == "1f1b" and micro_batches >= stages:
        ahead = under_way_in(stage, stages, micro_batches)
    elif chunks > 1:
        rounds = max(1, micro_batches // stages)
        ahead = (chunks - 1) * (micro_batches // rounds) + 2 * (stages - 1 - stage) + 1

    own = range(stage, stages * chunks, stages)
    forwards = list(_in_rounds(own, micro_batches, rounds))
    backwards = list(_in_rounds(own[::-1], micro_batches, rounds))

    for each in forwards[:ahead]:
        yield "forward", *each

    for number, each in enumerate(backwards):
        yield "backward", *each
        if number + ahead < len(forwards):
            yield "forward", *forwards[number + ahead]


def _in_rounds(
    chunks: Sequence[int],
    micro_batches: int,
    rounds: int,
) -> Iterator[tuple[int, int]]:
    """Chunks and micro-batches: those of a round go through all chunks before those of the next."""
    each = micro_batches // rounds
    for number in range(rounds):
        for chunk in chunks:
            for micro_batch in range(number * each, (number + 1) * each):
                yield chunk, micro_batch
