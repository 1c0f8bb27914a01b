from __future__ import annotations

from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.faithfulness import losses, tier_steps
from autofit.core.knobs import KNOBS


@pytest.mark.parametrize(
    ("steps", "knobs"),
    [
        (0, {}),
        (0, {"precision": "bf16-mixed", "optimizer": "adamw-8bit"}),
        (0, {"precision": "bf16", "optimizer": "adamw-sr"}),
        (0, {"precision": "fp8", "optimizer": "adamw-master"}),
        (1, {"lora_rank": 8, "precision": "bf16", "optimizer": "adamw-4bit"}),
        (2, {"lora_rank": 8, "quantization": "int8"}),
        (2, {"precision": "bf16"}),
        (2, {"precision": "bf16", "optimizer": "adamw-8bit"}),
        (2, {"optimizer": "adamw-4bit"}),
        (3, {"head_only": True}),
    ],
)
def test_how_far_below_full_training(steps: int, knobs: dict[str, Any]) -> None:
    assert tier_steps(Config(knobs)) == steps


def test_lossy_values_are_counted() -> None:
    assert losses(Config()) == 0
    assert losses(Config(lora_rank=8, quantization="nf4")) == 0
    assert losses(Config(lora_rank=8, quantization="int8", optimizer="paged-adamw-8bit")) == 1
    assert losses(Config(lora_rank=8, quantization="nf4-dq", optimizer="adamw-4bit")) == 3


def test_only_values_of_the_knob_are_lossy_and_never_the_most_faithful() -> None:
    lossy = [knob for knob in KNOBS.values() if knob.losses]
    assert lossy
    for knob in lossy:
        best = max(knob.fidelity, key=knob.fidelity.__getitem__)
        assert best not in knob.losses
        assert all(map(knob.accepts, knob.losses))
