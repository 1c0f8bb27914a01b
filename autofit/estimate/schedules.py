"""Schedules: a step of the whole model as a sequence of segments, in which those of the middle
blocks are repeated."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autofit.estimate.scaling import Floats
from autofit.estimate.segments import Repeats, Segment, Segments
from autofit.estimate.shallow_model import CHUNK, LONGEST_PERIOD

Schedule = list[tuple[Sequence[Segment], Repeats]]

# A segment of a schedule: the number of its run, and its own within that.
Place = tuple[int, int]
# By place, the share of the blocks there that something is done with; of what is not in it, none.
Shares = Mapping[Place, float]


def run_schedule(
    schedule: Schedule,
    live: Floats,
    *,
    added: bool = False,
    offloaded: Shares,
    resting: Shares,
    leaving: Floats | float = 0.0,
) -> tuple[Floats, Floats]:
    """(the peak, what is alive at the end) of a step, in bytes.

    Args:
        live: the bytes that it begins with.
        added: gradients are added to earlier ones, or applied, as soon as they are there.
        offloaded: of blocks, what they save goes to the host.
        resting: the gradients of a block leave the device with it.
        leaving: bytes of a block that do so beside the next one's backward.
    """
    highest = live
    for at, (run, repeats) in enumerate(schedule):
        rise = np.zeros_like(live)
        net = np.zeros_like(live)
        for number, segment in enumerate(run):
            share = offloaded.get((at, number), 0.0)
            climbed, more = _memory(segment, added, share)
            if (at, number) in resting:
                _, without = _memory(segment, True, share)
                more = more + resting[at, number] * (without - more)

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


def blocks_at(schedule: Schedule, blocks: int) -> dict[Place, range]:
    """The numbers of the blocks that each segment of one stands for.

    Empty where the schedule does not go through so many blocks once forward and once back.
    """
    found: dict[Place, range] = {}
    counts = {"forward": 0, "backward": 0}
    for at, (run, repeats) in enumerate(schedule):
        places = [(at, number) for number, segment in enumerate(run) if segment.of_block]
        if not places:
            continue

        assert isinstance(repeats, int), "chunks are no blocks"
        phase = run[0].phase
        step = len(places)
        for place, first in zip(places, itertools.count(counts[phase]), strict=False):
            numbers = range(first, first + step * repeats, step)
            if phase == "backward":
                last = blocks - 1
                numbers = range(last - numbers.start, last - numbers.stop, -step)
            found[place] = numbers

        counts[phase] += step * repeats

    return found if set(counts.values()) == {blocks} else {}


def _memory(segment: Segment, added: bool, offloaded: float) -> tuple[Floats, Floats]:
    """(how high a segment climbs, what it leaves), where such a share of what it saves is
    offloaded."""
    if offloaded in (0.0, 1.0):
        return segment.memory[added, bool(offloaded)]

    kept, moved = (segment.memory[added, mode] for mode in (False, True))
    climbed, left = (
        one + offloaded * (other - one) for one, other in zip(kept, moved, strict=True)
    )
    return climbed, left


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


def mixed(kinds: Sequence[Segments]) -> Schedule:
    """The schedule of blocks that are not all treated alike.

    Args:
        kinds: for each block of the whole model, the segments of a model whose blocks are all
            treated as that one is.
    """
    rest = kinds[-1]
    depth = rest.depth
    assert depth is not None, "a shortened model"
    blocks = [(kind, depth.stand_in(number)) for number, kind in enumerate(kinds)]
    last = blocks.pop()[1]
    runs = [(blocks[run.start : run.stop], repeats) for run, repeats in _runs(blocks)]

    schedule: Schedule = [([segment], rest.times(segment)) for segment in rest.before_blocks]
    for run, repeats in runs:
        schedule.append(
            ([segment for kind, at in run for segment in kind.of("forward", at)], repeats)
        )

    schedule.append((rest.of("forward", last) + rest.after_blocks, 1))

    schedule.append((rest.of("backward", None) + rest.of("backward", last), 1))
    for run, repeats in reversed(runs):
        backward = [segment for kind, at in reversed(run) for segment in kind.of("backward", at)]
        if backward:  # frozen blocks before the first trained one have none
            schedule.append((backward, repeats))

    return schedule


def _runs(blocks: Sequence[tuple[Segments, int]]) -> Iterator[tuple[range, int]]:
    """The blocks as stretches that are repeated: the first one of each, and how often."""
    keys = [(id(kind), stand_in) for kind, stand_in in blocks]
    start = 0
    while start < len(keys):
        longest = (1, 1)  # (a length, how often)
        for length in range(1, 2 * LONGEST_PERIOD + 1):
            times = 1
            first = keys[start : start + length]
            while keys[start + times * length :][:length] == first:
                times += 1

            if times > 1 and times * length > longest[0] * longest[1]:
                longest = (length, times)

        length, times = longest
        yield range(start, start + length), times
        start += length * times


def with_head(schedule: Schedule, head: Segments, let_go: Floats) -> Schedule:
    """The schedule with the head's forward and backward taken from other segments.

    Args:
        let_go: what the head's forward in the schedule frees of what was made before it.
    """
    forward = [(run, repeats) for run, repeats in schedule if run[0].phase == "forward"]
    body: Schedule = []
    for run, n in forward:
        is_begun = any(segment.of_block for earlier, _ in body for segment in earlier)
        body.append(([segment for segment in run if segment.of_block or not is_begun], n))

    backward: Schedule = []
    for run, n in schedule[len(forward) :]:
        is_begun = bool(backward)
        backward.append(([segment for segment in run if segment.of_block or is_begun], n))
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
