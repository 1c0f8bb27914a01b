"""What a child process is asked: the hardware, and how much of it a look at a model may take."""

import dataclasses
from typing import Any

import pytest

from autofit.core.hardware import GIB
from autofit.probe import measure
from tests import tiny

CARD = dataclasses.replace(
    tiny.CPU,
    device="cuda",
    name="NVIDIA L4",
    memory_bytes=22 * GIB,
    used_bytes=12 * GIB,
    capability=(8, 9),
    host_free_bytes=500 * GIB,
)


@pytest.mark.parametrize(("asked", "may_take"), [(None, 10), (24, 10), (4, 4)])
def test_a_look_at_a_model_takes_no_more_than_the_card_has_free_whatever_the_host_has(
    asked: int | None, may_take: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "detect", lambda _: CARD)
    monkeypatch.setattr(measure, "inspect_workload", lambda *given: given[-1])
    traits: Any = measure.inspect(tiny.mlp_workload(), "cuda", asked and asked * GIB)[1]
    assert traits == may_take * GIB
