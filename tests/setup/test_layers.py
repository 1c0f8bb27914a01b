"""Repeated blocks are found in the ways people stack layers, and nothing else is taken for one."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autofit.models.huggingface import HuggingFaceModel
from autofit.setup.layers import is_linear, is_plain_linear, repeated_blocks
from tests import tiny


class Layer(nn.Module):
    """More than one operation."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)


class Narrow(Layer):
    """A layer of another class."""


def test_a_module_list_and_a_sequence_of_layers() -> None:
    model = tiny.Transformer(depth=3)
    assert repeated_blocks(model) == list(model.blocks)
    model = tiny.ConvNet(depth=3)
    assert repeated_blocks(model) == list(model.blocks)


def test_the_layers_of_a_transformers_model() -> None:
    model = tiny.llama()()
    assert repeated_blocks(model) == list(model.model.layers)


def test_bare_linears_in_a_row_are_no_blocks() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    assert repeated_blocks(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])) == []


def test_one_layer_repeats_nothing() -> None:
    assert repeated_blocks(nn.ModuleList([Layer()])) == []
    assert repeated_blocks(nn.ModuleList([Layer(), nn.Linear(4, 4)])) == []


def test_children_without_weights_are_left_out() -> None:
    model = nn.Sequential(Layer(), nn.ReLU(), Layer(), nn.Dropout())
    assert repeated_blocks(model) == [model[0], model[2]]


class Stage(nn.Module):
    """Layers of a UNet beside others."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.others = nn.ModuleList([Narrow(), Narrow()])


def test_layers_that_diffusers_names_are_blocks_not_the_stages_that_hold_them() -> None:
    model: Any = nn.Module()
    model.stages = nn.ModuleList([Stage(1), Stage(2)])
    assert repeated_blocks(model) == list(model.stages)
    model._repeated_blocks = ["Layer"]
    inner = [layer for stage in model.stages for layer in (*stage.layers, *stage.others)]
    assert repeated_blocks(model) == inner


def test_no_block_inside_another() -> None:
    outer = nn.ModuleList([nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer())])
    assert repeated_blocks(outer) == list(outer)


def test_encoders_and_decoders_both_count() -> None:
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList([Layer(), Layer()]),
            "decoder": nn.ModuleList([Narrow(), Narrow()]),
        }
    )
    assert repeated_blocks(model) == [*model["encoder"], *model["decoder"]]


def test_a_layer_that_stands_there_several_times_is_one_block() -> None:
    layer = Layer()
    assert repeated_blocks(nn.ModuleList([layer, layer, layer])) == [layer]


def test_the_stages_of_a_residual_network() -> None:
    config = {
        "model_type": "resnet",
        "embedding_size": 4,
        "hidden_sizes": [8, 8],
        "depths": [2, 2],
        "num_labels": 3,
    }
    blocks = repeated_blocks(HuggingFaceModel("resnet", "image-classification", config)())
    assert len(blocks) >= 2
    assert not any(
        inner in blocks for block in blocks for inner in block.modules() if inner is not block
    )


class Written(nn.Linear):
    """A linear layer written out, as Falcon's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = input @ self.weight.T
        return out if self.bias is None else out + self.bias


class Routing(nn.Linear):
    """Returns more than a tensor."""

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = super().forward(input)
        return scores, scores.argmax(-1)


class Rectified(nn.Linear):
    """Returns something else than a linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight.relu(), self.bias)


class Grouped(nn.Linear):
    """Works with its own sizes alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input.unflatten(-1, (4, -1)), self.weight.unflatten(0, (4, -1))[0])


@pytest.mark.parametrize(
    ("kind", "plain"), [(Written, True), (Routing, False), (Rectified, False), (Grouped, False)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_linear_if_its_forward_computes_what_a_linear_layer_does(
    kind: type[nn.Linear], plain: bool, bias: bool
) -> None:
    layer = kind(8, 8, bias=bias, device="meta")
    before = torch.random.get_rng_state()
    assert is_linear(layer) is is_plain_linear(layer) is plain
    assert torch.equal(torch.random.get_rng_state(), before)
