"""The learning rate where none is given: ten times as high for few weights as for all."""

import pytest

from autofit.core.learning_rates import (
    default_hyperparameters,
    default_learning_rate,
    learning_rate_note,
)


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        ({}, 2e-5),
        ({"optimizer": "adamw-8bit"}, 2e-5),
        ({"lora_rank": 8}, 2e-4),
        ({"lora_rank": 8, "quantization": "nf4"}, 2e-4),
        ({"head_only": True}, 2e-4),
    ],
)
def test_each_tier_has_its_own(config: dict[str, object], rate: float) -> None:
    assert default_learning_rate(config) == default_hyperparameters(config).lr == rate
    assert f"the learning rate is {rate:g}, as" in learning_rate_note(config)
