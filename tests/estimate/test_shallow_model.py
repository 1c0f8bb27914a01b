import itertools

from torch import nn

from autofit.estimate.shallow_model import Cut, Depth, shorten
from tests.tiny import llama


def _model(layers: int, **changes: object) -> nn.Module:
    return llama(num_hidden_layers=layers, **changes)()


def test_the_middle_of_many_like_blocks_is_taken_out() -> None:
    model = _model(12)
    depth = shorten(model, Cut())
    assert depth == Depth(whole=12, retained=3, period=1, repeats=10, early=2)
    assert len(model.model.layers) == 3


def test_every_block_is_counted_once() -> None:
    for layers in range(6, 20):
        for first, alternating in itertools.product((1, 2), (False, True)):
            depth = shorten(_model(layers), Cut(first, alternating))
            if depth is not None:
                assert sum(depth.times(block) for block in range(depth.retained)) == layers


def test_alternating_blocks_are_kept_in_pairs() -> None:
    even, odd = (
        shorten(_model(12), Cut(alternating=True)),
        shorten(_model(13), Cut(alternating=True)),
    )
    assert even is not None and odd is not None
    assert even.period == odd.period == 2
    # which of two blocks is checkpointed depends on how many there are
    assert even.retained % 2 == 0 and odd.retained % 2 == 1


def test_blocks_of_other_kinds_among_them_are_repeated_as_they_come() -> None:
    model = _model(14)
    kinds = ["sliding", "sliding", "full"]
    model.config.layer_types = [kinds[place % 3] for place in range(14)]
    depth = shorten(model, Cut())
    assert depth is not None
    assert depth.period == 3
    assert depth.early == 3  # the first of full attention is among them


def test_too_few_blocks_or_unlike_ones_are_left_alone() -> None:
    assert shorten(_model(3), Cut()) is None
    assert shorten(nn.Linear(2, 2), Cut()) is None
    unlike = nn.Sequential(
        *(nn.Sequential(nn.Linear(size, size + 1), nn.ReLU()) for size in range(2, 12))
    )
    assert shorten(unlike, Cut()) is None
    assert len(unlike) == 10
