"""Hardware: the facts come back from JSON as they were, and what the user should know of them is said."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.plain import from_plain, to_plain
from tests import tiny

SIZES = ("memory_bytes", "host_memory_bytes", "host_free_bytes", "cores")


@given(
    st.builds(
        Hardware,
        **dict.fromkeys(SIZES, st.integers(0, 2**62)),
        device=st.sampled_from(["cpu", "cuda"]),
        capability=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 9)),
        measured_on=st.none() | st.text(),
    )
)
def test_a_journey_through_json_changes_nothing(hardware: Hardware) -> None:
    assert from_plain(Hardware, json.loads(json.dumps(to_plain(hardware)))) == hardware
    assert to_plain(hardware) == json.loads(json.dumps(hardware.to_dict()))


def test_units() -> None:
    assert (GIB, MIB) == (1024**3, 1024**2)
    assert tiny.CPU.memory_bytes == 8 * GIB


def test_segments_that_do_not_grow_are_noted() -> None:
    card = replace(tiny.CPU, device="cuda")
    fixed = replace(card, allocator="expandable_segments:False")
    assert [each.expandable_segments for each in (card, fixed)] == [True, False]
    assert replace(
        card, allocator="max_split_size_mb:64,expandable_segments:True"
    ).expandable_segments
    assert not replace(card, allocator="max_split_size_mb:64").expandable_segments
    assert not card.notes
    (note,) = fixed.notes
    assert note.startswith(
        "segments of device memory do not grow here (expandable_segments:False), which takes"
    )
    assert not tiny.CPU.notes
