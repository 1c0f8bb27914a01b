"""A model leaves the card while a search runs: the objects stay, the memory goes, and everything comes back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.errors import OutOfMemoryError
from autofit.training import set_aside as room
from autofit.training.set_aside import set_aside


class Tied(nn.Module):
    """Weights that are tied, that lie in one piece of memory, and a buffer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.randn(20)
        self.one, self.other = nn.Parameter(flat[:8].view(2, 4)), nn.Parameter(flat[8:].view(4, 3).T)
        self.register_buffer("mean", torch.randn(3))
        self.embed.weight.grad = torch.randn(6, 4)


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), model.embed.weight.grad]


def test_the_objects_stay_and_their_memory_is_let_go() -> None:
    """The host stands for the card: what leaves it gets other memory there."""
    model = Tied()
    before = [(each, each.detach().clone(), each.data_ptr(), each.stride()) for each in tensors(model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with set_aside(model, leaves="cpu"):
        for now, (each, values, place, stride) in zip(tensors(model), before, strict=True):
            assert now is each
            assert torch.equal(now, values)
            assert now.data_ptr() != place
            assert now.stride() == stride
        assert model.head.weight is model.embed.weight
        assert model.one.untyped_storage().data_ptr() == model.other.untyped_storage().data_ptr()
        aside = [each.data_ptr() for each in tensors(model)]
    for now, (each, values, _, _), place in zip(tensors(model), before, aside, strict=True):
        assert now is each
        assert torch.equal(now, values)
        assert now.data_ptr() != place
    expected = model.embed.weight.detach() - model.embed.weight.grad
    optimizer.step()
    assert torch.equal(model.head.weight, expected)


def test_what_holds_nothing_comes_back_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is empty has the same address, 0, wherever it is."""
    card = torch.device("cuda", 1)
    empty = SimpleNamespace(device=card, data_ptr=lambda: 0)

    def move(places: Any) -> None:
        for each, device in places:
            each.device = device

    monkeypatch.setattr(room, "_dense", lambda _: [empty])
    monkeypatch.setattr(room, "_move", move)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with set_aside(nn.Module()):
        assert empty.device == torch.device("cpu")
    assert empty.device == card


def test_it_comes_back_however_the_search_ends() -> None:
    model = Tied()
    aside = []
    with pytest.raises(KeyboardInterrupt), set_aside(model, leaves="cpu"):
        aside += [each.data_ptr() for each in tensors(model)]
        raise KeyboardInterrupt
    assert all(one.data_ptr() != other for one, other in zip(tensors(model), aside, strict=True))


def test_what_is_elsewhere_or_has_no_plain_memory_stays() -> None:
    model = Tied()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    addresses = [each.data_ptr() for each in tensors(model) if each.layout == torch.strided]
    with set_aside(model):
        assert [each.data_ptr() for each in tensors(model) if each.layout == torch.strided] == addresses
    with set_aside(model, leaves="cpu"):
        assert model.graph.is_sparse


def test_where_there_is_no_room_any_more_the_model_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    values = [each.detach().clone() for each in tensors(model)]
    real, calls = room._move, 0

    def move(places: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the way back
            raise torch.OutOfMemoryError("CUDA out of memory.")
        real(places)

    monkeypatch.setattr(room, "_move", move)
    with (
        pytest.raises(OutOfMemoryError, match="its memory on the card was taken meanwhile"),
        set_aside(model, leaves="cpu"),
    ):
        pass
    assert all(map(torch.equal, tensors(model), values))


@pytest.mark.gpu
def test_the_card_is_free_meanwhile() -> None:
    model = nn.LSTM(1024, 1024, 4).cuda()
    model(torch.ones(1, 1, 1024, device="cuda"))[0].sum().backward()
    nbytes = 2 * sum(each.nbytes for each in model.parameters())
    before, (free, _) = [each.detach().cpu() for each in model.parameters()], torch.cuda.mem_get_info()
    with set_aside(model):
        assert {each.device.type for each in model.parameters()} == {"cpu"}
        assert torch.cuda.mem_get_info()[0] - free >= nbytes
        assert torch.cuda.memory_allocated() < nbytes / 10
    assert {each.device.type for each in model.parameters()} == {"cuda"}
    assert {each.grad.device.type for each in model.parameters()} == {"cuda"}
    assert all(torch.equal(one.cpu(), other) for one, other in zip(model.parameters(), before, strict=True))
    model(torch.ones(1, 1, 1024, device="cuda"))  # cuDNN warns of weights that no longer lie in one piece
