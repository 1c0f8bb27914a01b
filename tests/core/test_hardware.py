"""Hardware: the facts come back from JSON as they were."""

import json

import tiny
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.hardware import GIB, MIB, Hardware


@given(
    st.builds(
        Hardware,
        device=st.sampled_from(["cpu", "cuda"]),
        capability=st.none() | st.tuples(st.integers(0, 12), st.integers(0, 9)),
        measured_on=st.none() | st.text(),
    )
)
def test_a_journey_through_json_changes_nothing(hardware: Hardware) -> None:
    assert Hardware.from_dict(json.loads(json.dumps(hardware.to_dict()))) == hardware


def test_units() -> None:
    assert (GIB, MIB) == (1024**3, 1024**2)
    assert tiny.CPU.memory_bytes == 8 * GIB
