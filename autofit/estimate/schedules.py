"""Schedules: a step of the whole model as a sequence of segments, in which those of the middle
blocks are repeated."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autofit.estimate.scaling import Floats
from autofit.estimate.segments import Mode, Repeats, Segment, Segments
from autofit.estimate.shallow_model import CHUNK

Schedule = list[tuple[Sequence[Segment], Repeats]]


def run_schedule(
    schedule: Schedule,
    mode: Mode,
    live: Floats,
    *,
    resting: bool = False,
    leaving: Floats | float = 0.0,
) -> tuple[Floats, Floats]:
    """(the peak, what is alive at the end) of a step, in bytes.

    Args:
        live: the bytes that it begins with.
        resting: the gradients of a block leave the device with it.
        leaving: bytes of a block that do so beside the next one's backward.
    """
    highest = live
    for run, repeats in schedule:
        rise = np.zeros_like(live)
        net = np.zeros_like(live)
        for segment in run:
            climbed, more = segment.memory[mode]
            if resting and segment.of_block:
                _, more = segment.memory[True, mode[1]]
            rise = np.maximum(rise, net + climbed)
            net = net + more

            # From the second one on a block leaves.
            if segment.of_block and segment.phase == "backward":
                net = net + leaving
                leaving = 0.0

        # The highest of what is repeated is in its first round or in its last.
        last_begins = live + net * (repeats - 1)
        highest = np.maximum(highest, live + rise)
        highest = np.maximum(highest, last_begins + rise)
        live = live + net * repeats
    return highest, live


def as_traced(segments: Segments) -> Schedule:
    """The schedule of the whole model, all blocks as they were traced."""
    schedule: list[tuple[list[Segment], Repeats]] = []
    before: Segment | None = None
    for segment in segments.items:
        repeats = segments.times(segment)
        goes_on = before is not None and before.phase == segment.phase
        # How often chunks repeat differs by pair.
        if before is not None and CHUNK in (before.block, segment.block):
            goes_on = False

        if goes_on and schedule[-1][1] == repeats:
            schedule[-1][0].append(segment)
        else:
            schedule.append(([segment], repeats))
        before = segment
    return list(schedule)


def alternating(plain: Segments, full: Segments) -> Schedule:
    """Every second block checkpointed, never the last: activation_checkpointing `alternate`.

    Args:
        plain, full: of blocks that are not checkpointed, and of those that are.
    """
    depth = plain.depth
    assert depth is not None and depth.period == 1, "blocks that are all alike"
    kinds = [full if block % 2 == depth.whole % 2 else plain for block in range(depth.whole)]
    middle = depth.middle[0]  # as traced
    last = middle + 1
    pairs, odd = divmod(depth.repeats, 2)
    first = kinds[middle]
    second = kinds[middle + 1]

    schedule: Schedule = [([segment], plain.times(segment)) for segment in plain.before_blocks]
    for block in range(middle):
        schedule.append((kinds[block].of("forward", block), 1))
    forward = first.of("forward", middle)
    schedule.append((forward + second.of("forward", middle), pairs))
    schedule.append((forward, odd))
    schedule.append((plain.of("forward", last) + plain.after_blocks, 1))

    schedule.append((plain.of("backward", None) + plain.of("backward", last), 1))
    backward = first.of("backward", middle)
    schedule.append((backward, odd))
    schedule.append((second.of("backward", middle) + backward, pairs))
    for block in reversed(range(middle)):
        schedule.append((kinds[block].of("backward", block), 1))
    return schedule


def with_head(schedule: Schedule, head: Segments, let_go: Floats) -> Schedule:
    """The schedule with the head's forward and backward taken from other segments.

    Args:
        let_go: what the head's forward in the schedule frees of what was made before it.
    """
    forward = [(run, repeats) for run, repeats in schedule if run[0].phase == "forward"]
    body: Schedule = []
    for run, n in forward:
        is_begun = any(each.of_block for earlier, _ in body for each in earlier)
        body.append(([each for each in run if each.of_block or not is_begun], n))

    backward: Schedule = []
    for run, n in schedule[len(forward) :]:
        is_begun = bool(backward)
        backward.append(([each for each in run if each.of_block or is_begun], n))
        if not backward[-1][0]:
            backward.pop()

    # The new head lets go as much as the one in the schedule.
    ([start], n), *chunks = _alone(head, head.after_blocks)
    more = head.let_go - let_go
    memory = {mode: (high + more, net + more) for mode, (high, net) in start.memory.items()}
    start = replace(start, memory=memory)

    ends = _alone(head, head.backward_of_head)
    return [(run, n) for run, n in body if run] + [([start], n), *chunks, *ends] + backward


def _alone(segments: Segments, chosen: Sequence[Segment]) -> Schedule:
    """Each of some segments by itself, such as each chunk of the loss, as often as it occurs."""
    return [([segment], segments.times(segment)) for segment in chosen]
