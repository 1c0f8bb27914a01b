"""Weights come back in the format they came in, and modules in their mode."""

from typing import Any

import pytest
import torch
from torch import nn

from autofit.training.given_back import formats_to_keep, given_back
from tests import tiny


def partly_frozen() -> nn.Module:
    model = tiny.MLP()
    model.layers.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "settings", "keeps"),
    [
        (tiny.MLP(), {}, (("float32",), ())),
        (tiny.MLP().bfloat16(), {"micro_batch_size": 4}, (("bfloat16",), ())),
        (partly_frozen(), {}, (("float32",), ("float32",))),
        (tiny.MLP().bfloat16(), {"lora_rank": 8}, ((), ("bfloat16",))),
        (tiny.MLP(), {"lora_rank": [0, 8], "quantization": "none"}, (("float32",), ("float32",))),
        (tiny.MLP(), {"precision": ["bf16", "fp32"]}, None),
        (tiny.MLP(), {"lora_rank": 8, "quantization": ["nf4"]}, None),
    ],
)
def test_what_is_to_be_kept(model: nn.Module, settings: dict[str, Any], keeps: Any) -> None:
    assert formats_to_keep(model, settings) == keeps


def changed(model: nn.Module, *, formats: bool) -> dict[str, torch.dtype]:
    """The formats after all weights were held in another one, and running statistics beside them."""
    with pytest.raises(KeyboardInterrupt), given_back(model, formats=formats):  # also where training is broken off
        model.bfloat16()
        model.eval()
        model.blocks[0].norm = nn.BatchNorm2d(16)  # one that was not there before
        raise KeyboardInterrupt
    assert model.training
    return {name: each.dtype for name, each in model.state_dict().items()}


def test_weights_and_statistics_are_in_their_format_again_and_what_is_new_stays() -> None:
    model = tiny.ConvNet()
    model.fc.half()
    model.blocks[1].eval()
    weight = model.stem.weight
    dtypes = changed(model, formats=True)
    assert dtypes["stem.weight"] == dtypes["blocks.1.norm.running_mean"] == torch.float32
    assert dtypes["fc.weight"] == torch.float16
    assert dtypes["blocks.1.norm.num_batches_tracked"] == torch.int64
    assert model.stem.weight is weight
    assert not model.blocks[1].training
    assert model.blocks[0].norm.training
    assert changed(model, formats=False)["stem.weight"] == torch.bfloat16
