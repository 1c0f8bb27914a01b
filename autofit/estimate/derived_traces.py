"""Traces that need not be recorded, because they follow from others.

Attention's effect on a block does not depend on adapters or quantisation, so the difference that it
makes between two traces is added to a third one instead of recording a fourth.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autofit.core.config import Config
from autofit.core.knobs import KNOBS, OF_ADAPTERS
from autofit.estimate.roofline import Work
from autofit.estimate.segments import Segment, Segments


class DerivedTrace(NamedTuple):
    """The traces that one is derived from.

    Attributes:
        own: with its own weights, but the usual attention.
        other: with other weights, and its own attention.
        usual: with other weights, and the usual attention.
    """

    own: Config
    other: Config
    usual: Config


def derived_trace(key: Config, keys: Collection[Config]) -> DerivedTrace | None:
    """What a trace is derived from; None where it must be recorded itself.

    Args:
        keys: of the traces that are recorded anyway.
    """
    if key.attention == "sdpa":
        return None

    adapters = {name: KNOBS[name].off for name in key if name in OF_ADAPTERS}
    for changes in (adapters, {}):
        other = key.replace(quantization="none", **changes)
        found = DerivedTrace(
            key.replace(attention="sdpa"),
            other,
            other.replace(attention="sdpa"),
        )
        if other != key and all(config in keys for config in found):
            return found

    return None


def segments_like(
    own: Segments | None,
    other: Segments | None,
    usual: Segments | None,
) -> Segments | None:
    """`own` with what `other` differs by from `usual`; None where one is missing, or they consist
    of other parts."""
    if (
        not own
        or not other
        or not usual
        or not len(own.items) == len(other.items) == len(usual.items)
    ):
        return None

    items = [_changed(*parts) for parts in zip(own.items, other.items, usual.items, strict=True)]

    return replace(own, items=tuple(filter(None, items))) if all(items) else None


def _changed(own: Segment, other: Segment, usual: Segment) -> Segment | None:
    alike = len({(segment.phase, segment.block) for segment in (own, other, usual)}) == 1
    work = _changed_work(own.work, other.work, usual.work) if alike else None
    if work is None:
        return None

    memory = {}
    for mode, (highest, left) in own.memory.items():
        (with_it, after_it), (without, after) = other.memory[mode], usual.memory[mode]
        left = left + after_it - after
        memory[mode] = np.maximum(highest + with_it - without, np.maximum(left, 0.0)), left

    return replace(
        own,
        memory=memory,
        saved=own.saved + other.saved - usual.saved,
        work=work,
    )


def _changed_work(own: Work, other: Work, usual: Work) -> Work | None:
    """The operators of `own` without those that `usual` has and `other` lacks, and with those that
    it has more."""
    gone = Counter(usual.calls) - Counter(other.calls)
    more = Counter(other.calls) - Counter(usual.calls)
    if not gone <= Counter(own.calls):
        return None

    kept = _split(own, gone)[1]
    added = _split(other, more)[0]

    return Work(
        kinds=(*(own.kinds[index] for index in kept), *(other.kinds[index] for index in added)),
        calls=(*(own.calls[index] for index in kept), *(other.calls[index] for index in added)),
        flops=np.concatenate([own.flops[kept], other.flops[added]]),
        nbytes=np.concatenate([own.nbytes[kept], other.nbytes[added]]),
        dispatched=own.dispatched + other.dispatched - usual.dispatched,
    )


def _split(work: Work, wanted: Counter[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """The indices of as many calls as wanted, and all others."""
    left = wanted.copy()
    found = list[int]()
    others = list[int]()
    for index, call in enumerate(work.calls):
        (found if left[call] > 0 else others).append(index)
        left[call] -= 1

    return found, others
