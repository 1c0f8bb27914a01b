"""What predictions of a space are found again by: all that they depend on."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.estimate.space_estimator import cache_key_of
from tests import tiny

CARD = dataclasses.replace(tiny.CPU, device="cuda", name="NVIDIA H200", capability=(9, 0))
RATES: Any = SimpleNamespace(matmul={}, bandwidth=1.0, link=1.0, launch_seconds=0.0, pass_seconds=0.0)


def key(hardware: Hardware) -> str | None:
    nothing = dict.fromkeys(("loss", "count", "optimizer"))
    workload: Any = SimpleNamespace(
        model=SimpleNamespace(config={}), source={"kind": "preset"}, summary=dict, **nothing
    )
    return cache_key_of(workload, hardware, RATES, [Config(attention="flash")])


def test_what_is_planned_for_a_card_elsewhere_is_not_taken_for_what_packages_here_can_do() -> None:
    """flash-attn is taken to be installed there, and is what `flash` stands for."""
    assert key(CARD) == key(dataclasses.replace(CARD, host_free_bytes=1))
    assert key(CARD) != key(dataclasses.replace(CARD, here=False))
