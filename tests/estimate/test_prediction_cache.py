"""What predictions of a space are found again by: all that they depend on."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.estimate.figures import cache_key_of
from tests import tiny

CARD = dataclasses.replace(tiny.CPU, device="cuda", name="NVIDIA H200", capability=(9, 0))
RATES: Any = SimpleNamespace(
    matmul={}, bandwidth=1.0, link=1.0, launch_seconds=0.0, pass_seconds=0.0
)


def key(hardware: Hardware = CARD, **model: Any) -> str | None:
    nothing = dict.fromkeys(("loss", "count", "split", "optimizer"))
    described = SimpleNamespace(**{"config": {}, **model})
    workload: Any = SimpleNamespace(
        model=described, source={"kind": "preset"}, summary=dict, **nothing
    )
    return cache_key_of(workload, hardware, RATES, [Config(attention="flash")])


def test_what_is_planned_for_a_card_elsewhere_is_not_taken_for_what_packages_here_can_do() -> None:
    """flash-attn is taken to be installed there, and is what `flash` stands for."""
    assert key(CARD) == key(dataclasses.replace(CARD, host_free_bytes=1))
    assert key(CARD) != key(dataclasses.replace(CARD, here=False))


def test_where_a_model_lies_does_not_matter_unless_code_lies_there_too() -> None:
    places = [{"hidden_size": 8, "_name_or_path": place} for place in ("here", "there")]
    assert key(config=places[0]) == key(config=places[1]) != key()
    assert key(config=places[0], trust_remote_code=True) is None
