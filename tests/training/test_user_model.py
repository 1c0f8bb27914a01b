"""The user's model leaves the card while a search runs, and comes back in its modes and dtypes after training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.errors import OutOfMemoryError
from autofit.training import user_model
from autofit.training.user_model import dtypes_to_restore, moved_to_host, restored
from tests import tiny


class Tied(nn.Module):
    """Weights that are tied, that lie in one piece of memory, and a buffer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.randn(20)
        self.one, self.other = (
            nn.Parameter(flat[:8].view(2, 4)),
            nn.Parameter(flat[8:].view(4, 3).T),
        )
        self.register_buffer("mean", torch.randn(3))
        self.embed.weight.grad = torch.randn(6, 4)


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), model.embed.weight.grad]


def test_the_objects_stay_and_their_memory_is_let_go() -> None:
    """The host stands for the card: what leaves it gets other memory there."""
    model = Tied()
    before = [
        (each, each.detach().clone(), each.data_ptr(), each.stride()) for each in tensors(model)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with moved_to_host(model, device_type="cpu"):
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

    monkeypatch.setattr(user_model, "_dense", lambda _: [empty])
    monkeypatch.setattr(user_model, "_move", move)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with moved_to_host(nn.Module()):
        assert empty.device == torch.device("cpu")
    assert empty.device == card


def test_it_comes_back_however_the_search_ends() -> None:
    model = Tied()
    aside = []
    with pytest.raises(KeyboardInterrupt), moved_to_host(model, device_type="cpu"):
        aside += [each.data_ptr() for each in tensors(model)]
        raise KeyboardInterrupt
    assert all(one.data_ptr() != other for one, other in zip(tensors(model), aside, strict=True))


def test_what_is_elsewhere_or_has_no_plain_memory_stays() -> None:
    model = Tied()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    addresses = [each.data_ptr() for each in tensors(model) if each.layout == torch.strided]
    with moved_to_host(model):
        assert [
            each.data_ptr() for each in tensors(model) if each.layout == torch.strided
        ] == addresses
    with moved_to_host(model, device_type="cpu"):
        assert model.graph.is_sparse


def test_where_there_is_no_user_model_any_more_the_model_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Tied()
    values = [each.detach().clone() for each in tensors(model)]
    real, calls = user_model._move, 0

    def move(places: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the way back
            raise torch.OutOfMemoryError("CUDA out of memory.")
        real(places)

    monkeypatch.setattr(user_model, "_move", move)
    with (
        pytest.raises(OutOfMemoryError, match="its memory on the card was taken meanwhile"),
        moved_to_host(model, device_type="cpu"),
    ):
        pass
    assert all(map(torch.equal, tensors(model), values))


@pytest.mark.gpu
def test_the_card_is_free_meanwhile() -> None:
    model = nn.LSTM(1024, 1024, 4).cuda()
    model(torch.ones(1, 1, 1024, device="cuda"))[0].sum().backward()
    nbytes = 2 * sum(each.nbytes for each in model.parameters())
    before, (free, _) = (
        [each.detach().cpu() for each in model.parameters()],
        torch.cuda.mem_get_info(),
    )
    with moved_to_host(model):
        assert {each.device.type for each in model.parameters()} == {"cpu"}
        assert torch.cuda.mem_get_info()[0] - free >= nbytes
        assert torch.cuda.memory_allocated() < nbytes / 10
    assert {each.device.type for each in model.parameters()} == {"cuda"}
    assert {each.grad.device.type for each in model.parameters()} == {"cuda"}
    assert all(
        torch.equal(one.cpu(), other) for one, other in zip(model.parameters(), before, strict=True)
    )
    # cuDNN warns of weights that no longer lie in one piece
    model(torch.ones(1, 1, 1024, device="cuda"))


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
    assert dtypes_to_restore(model, settings) == keeps


def changed(model: nn.Module, *, dtypes: bool) -> dict[str, torch.dtype]:
    """The dtypes after all weights were held in another one, and running statistics beside them."""
    # also where training is broken off
    with pytest.raises(KeyboardInterrupt), restored(model, dtypes=dtypes):
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
    dtypes = changed(model, dtypes=True)
    assert dtypes["stem.weight"] == dtypes["blocks.1.norm.running_mean"] == torch.float32
    assert dtypes["fc.weight"] == torch.float16
    assert dtypes["blocks.1.norm.num_batches_tracked"] == torch.int64
    assert model.stem.weight is weight
    assert not model.blocks[1].training
    assert model.blocks[0].norm.training
    assert changed(model, dtypes=False)["stem.weight"] == torch.bfloat16
