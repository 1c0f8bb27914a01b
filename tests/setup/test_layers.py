"""Repeated blocks are found in the ways people stack layers, and nothing else is taken for one."""

from torch import nn

from autofit.models.huggingface import HuggingFaceModel
from autofit.setup.layers import repeated_blocks
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


def test_no_block_inside_another() -> None:
    outer = nn.ModuleList([nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer())])
    assert repeated_blocks(outer) == list(outer)


def test_encoders_and_decoders_both_count() -> None:
    model = nn.ModuleDict(
        {"encoder": nn.ModuleList([Layer(), Layer()]), "decoder": nn.ModuleList([Narrow(), Narrow()])}
    )
    assert repeated_blocks(model) == [*model["encoder"], *model["decoder"]]


def test_a_layer_that_stands_there_several_times_is_one_block() -> None:
    layer = Layer()
    assert repeated_blocks(nn.ModuleList([layer, layer, layer])) == [layer]


def test_the_stages_of_a_residual_network() -> None:
    config = {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [8, 8], "depths": [2, 2], "num_labels": 3}
    blocks = repeated_blocks(HuggingFaceModel("resnet", "image-classification", config)())
    assert len(blocks) >= 2
    assert not any(inner in blocks for block in blocks for inner in block.modules() if inner is not block)
