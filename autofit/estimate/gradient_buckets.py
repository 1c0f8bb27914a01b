"""DDP's buckets of gradients in a deep model of which few blocks are followed.

A bucket does not end where a block does, so buckets of few blocks tell nothing about those of many.
But all that a bucket does in a step is to be there: it is made before the step, and stays. So each
weight has a bucket of its own in the traces of few blocks, and the whole trace gets the real ones
in their place.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import groupby

import torch

from autofit.estimate.recorder import Collective, Event
from autofit.estimate.step_trace import Trace
from autofit.setup.buckets import LARGEST_BUCKET, buckets_of

# The shape and dtype of a trained weight, and its block.
Weight = tuple[torch.Size, torch.dtype, int | None]


def with_buckets(whole: Trace, more: Trace, missing: int) -> Trace | None:
    """A whole trace with buckets of several weights.

    Args:
        whole: with a bucket for each weight.
        more: the trace of few blocks that it was made from.
        missing: how many periods of blocks the whole model has more.

    Returns:
        None where the trace does not have a bucket for each weight: not all of them are trained.
    """
    weights = _weights_of_all(more, missing)
    weights.reverse()  # as buckets are filled

    built = whole.start("state")
    singles = [
        number
        for number, event in enumerate(whole.events[:built])
        if event.nbytes and whole.labels.get(event.storage) == "gradients"
    ]
    shapes = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in weights]
    sizes = [whole.events[number].nbytes for number in singles]
    if sizes != [shape.nbytes for shape in shapes]:
        return None

    storages = [whole.events[number].storage for number in singles]
    events = list(whole.events)
    completed = dict(whole.completed)
    labels = dict(whole.labels)
    for bucket in buckets_of(shapes):
        first, *others = bucket
        nbytes = sum(sizes[index] for index in bucket)
        events[singles[first]] = Event(storages[first], nbytes)

        filled = [completed.pop(storages[index], 0) for index in bucket]
        completed[storages[first]] = max(filled)
        for index in others:
            # An event of no bytes that frees nothing: the numbers of events stay.
            events[singles[index]] = Event(storages[index], 0)
            labels.pop(storages[index])

    return replace(whole, events=tuple(events), completed=completed, labels=labels)


def _weights_of_all(more: Trace, missing: int) -> list[Weight]:
    """The trained weights of the whole model, in their order."""
    assert more.depth, "it was shortened"
    last_early = more.depth.early + more.depth.period - 1
    first_copied = last_early - more.depth.period + 1

    weights: list[Weight] = []
    copied: list[Weight] = []
    for block, of_block in groupby(more.shapes, key=lambda weight: weight[2]):
        found = list(of_block)
        weights += found
        if block is not None and first_copied <= block <= last_early:
            copied += found
        if block == last_early:
            weights += copied * missing

    return weights


def in_large_buckets(traced: Trace) -> Trace:
    """A trace of few blocks whose gradients are added up by several weights of a block at once, as
    they are in buckets."""
    starts = [mark.events for mark in traced.marks]
    merged: list[Collective] = []
    section = -1
    for collective in traced.collectives:
        before, section = section, bisect_right(starts, collective.event)
        if section == before and _fit_one_bucket(merged[-1], collective):
            together = merged[-1].nbytes + collective.nbytes
            merged[-1] = replace(collective, nbytes=together)
        else:
            merged.append(collective)

    return replace(traced, collectives=tuple(merged))


def _fit_one_bucket(one: Collective, other: Collective) -> bool:
    """Whether gradients that are added up apart could be in one bucket."""
    are_gradients = all(each.kind == "all_reduce" and not each.waits for each in (one, other))
    return are_gradients and one.nbytes + other.nbytes <= LARGEST_BUCKET
