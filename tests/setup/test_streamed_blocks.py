"""Streamed blocks: two at a time on the device, the same gradients, whatever a model does with its blocks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autofit.core.workload import Workload
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.setup.streamed_blocks import BlockStreamer
from tests import tiny
from tests.late_lane import LateLane
from tests.streaming import gradient_bytes, resident_bytes, streamed_bytes

SMALLEST = 256
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 5,
    "n_head": 2,
    "n_positions": 64,
}


def gpt2_workload() -> Workload:
    from autofit.models.huggingface import HuggingFaceModel, huggingface_workload

    factory = HuggingFaceModel(
        "tiny-gpt2", "causal-lm", GPT2, {"kind": "directory", "path": "tiny"}
    )
    return huggingface_workload(factory, sequence_length=16, effective_batch_size=4)


WORKLOADS = {
    "llama": tiny.llama_workload(num_hidden_layers=5),
    "gpt2": gpt2_workload(),
    "plain": dataclasses.replace(
        tiny.transformer_workload(), model=lambda: tiny.Transformer(depth=5)
    ),
}
every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def half_frozen(workload: Workload) -> nn.Module:
    """Matrices inside the blocks are frozen, everything else is trained; so is what enters the first block."""
    torch.manual_seed(0)
    model = workload.model()
    for block in repeated_blocks(model):
        for parameter in block.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
    return model


def streamed(model: nn.Module, *, lane: CopyLane | None = None, **options: Any) -> BlockStreamer:
    return BlockStreamer(
        model, repeated_blocks(model), lane or LateLane(), smallest=SMALLEST, **options
    )


def residents(streamer: BlockStreamer) -> list[int]:
    """The blocks on the device after each time that one is needed, from now on."""
    log: list[int] = []
    need = streamer._need

    def noted(block: Any) -> None:
        need(block)
        sizes = {each.storage.nbytes() > 0 for each in block.memories}
        assert sizes <= {True}, "a block that runs has all its weights"
        log.append(sum(any(r.storage.nbytes() for r in each.memories) for each in streamer.blocks))

    streamer._need = noted
    return log


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    torch.manual_seed(1)  # of dropout
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def checkpointed(model: nn.Module, every: int) -> None:
    for block in repeated_blocks(model)[::every]:
        inner = block.forward
        block.forward = lambda *args, inner=inner, **kwargs: checkpoint(
            inner, *args, use_reentrant=False, **kwargs
        )


@pytest.mark.parametrize("checkpoint_every", [0, 1, 2])
@every_workload
def test_gradients_are_the_same_with_two_blocks_at_a_time(
    workload: Workload, checkpoint_every: int
) -> None:
    model, batch = half_frozen(workload), workload.batch(4)
    plain = gradients(model, loss_of(model, batch))
    streamer = streamed(model)
    if checkpoint_every:
        checkpointed(model, checkpoint_every)
    log = residents(streamer)
    for _ in range(3):
        assert same(plain, gradients(model, loss_of(model, batch)))
    assert len(streamer.blocks) == 5
    assert max(log) == 2
    matrices = sum(
        p.nbytes for block in repeated_blocks(model) for p in block.parameters() if p.dim() >= 2
    )
    assert streamed_bytes(streamer) == matrices
    # the first block alone, after the backward
    assert resident_bytes(streamer) == pytest.approx(matrices / 5)


@every_workload
def test_each_weight_is_copied_once_a_forward_and_once_a_backward(workload: Workload) -> None:
    model, batch = half_frozen(workload), workload.batch(4)
    streamer = streamed(model)
    gradients(model, loss_of(model, batch))
    lane = streamer._lane
    before = lane.asked, lane.copies
    gradients(model, loss_of(model, batch))
    # The first is there, the last two are kept for the backward. All weights of a block are one copy.
    assert lane.asked - before[0] == lane.copies - before[1] == 4 + 3


def test_when_the_first_block_needs_no_gradient_as_with_lora() -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    model.embed.requires_grad_(False)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    plain = gradients(model, loss_of(model, batch))
    log = residents(streamed(model))
    for _ in range(2):
        assert same(plain, gradients(model, loss_of(model, batch)))
    assert max(log) == 2


def test_an_evaluation_between_steps() -> None:
    workload = WORKLOADS["llama"]
    model, batch = half_frozen(workload), workload.batch(4)
    plain, loss = gradients(model, loss_of(model, batch)), loss_of(model, batch).detach()
    log = residents(streamed(model))
    for context in (torch.no_grad(), torch.inference_mode(), torch.no_grad()):
        with context:
            assert torch.equal(loss_of(model, batch), loss)
            assert torch.equal(loss_of(model, batch), loss)
        assert same(plain, gradients(model, loss_of(model, batch)))
    assert max(log) == 2


def test_two_forwards_before_the_backward_of_the_first() -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    plain = gradients(model, loss_of(model, batch))
    streamed(model)
    first, _ = loss_of(model, batch), loss_of(model, batch)
    assert same(plain, gradients(model, first))


def test_a_forward_that_fails_harms_nothing() -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    plain = gradients(model, loss_of(model, batch))
    log = residents(streamed(model))
    handle = model.blocks[3].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch)
    handle.remove()
    assert same(plain, gradients(model, loss_of(model, batch)))
    assert max(log) == 2


def test_weights_that_are_tied_to_another_block_or_to_something_else_stay() -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    model.blocks[1].mlp[0].weight = model.blocks[0].mlp[0].weight
    # one memory
    model.blocks[2].mlp[2].weight = nn.Parameter(
        model.blocks[3].mlp[2].weight.data, requires_grad=False
    )
    model.extra = nn.Linear(32, 96, bias=False)
    model.extra.weight = model.blocks[4].attn["qkv"].weight
    model.blocks[4].mlp.append(nn.Linear(32, 32, bias=False))
    # inside of one block: streamed, once
    model.blocks[4].mlp[3].weight = model.blocks[4].attn["out"].weight
    plain = gradients(model, loss_of(model, batch))
    streamer = streamed(model)
    assert same(plain, gradients(model, loss_of(model, batch)))
    tied = (model.blocks[1].mlp[0].weight, model.blocks[2].mlp[2].weight, model.extra.weight)
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in tied)
    matrix = 4 * 32 * 128
    assert (
        streamed_bytes(streamer) == 5 * (2 * matrix + 4 * 32 * (96 + 32)) - 4 * matrix - 4 * 32 * 96
    )


class Stashing(nn.Module):
    """A block whose inner product reaches the loss past its output, as a router's scores do; returns a dataclass."""

    @dataclasses.dataclass
    class Output:
        hidden: torch.Tensor
        nothing: None = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.router = nn.Sequential(nn.Linear(32, 32))
        self.inner = nn.Linear(32, 32)
        for layer in (self.router, self.inner):
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        self.stash = self.router(x * self.scale)
        return Stashing.Output(
            functional.relu(functional.linear(x, self.inner.weight)) * self.scale
        )


class Stashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stashing() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).hidden
        return x.sum() + sum(block.stash.square().sum() for block in self.blocks[::2])


class Backwards(Stashed):
    """Runs its blocks from the last to the first, one of them twice, and leaves one out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (4, 3, 3, 1, 0):
            x = self.blocks[number](x).hidden
        return x.sum()


class Parts(Stashed):
    """Calls the parts of its blocks by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = functional.relu(block.inner(x)) * block.scale + block.router(x)
        return x.sum()


@pytest.mark.parametrize("kind", [Stashed, Backwards, Parts])
def test_unusual_models(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 32)
    plain = gradients(model, model(x))
    streamer = streamed(model)
    log = residents(streamer)
    for _ in range(3):
        assert same(plain, gradients(model, model(x)))
    assert max(log) == 2
    assert streamed_bytes(streamer) == 5 * 2 * 32 * 32 * 4


def test_the_order_that_a_model_really_has_is_learned() -> None:
    model, x = Backwards(), torch.randn(8, 32)
    streamer = streamed(model)
    counts = []
    for _ in range(3):
        before = streamer._lane.asked
        gradients(model, model(x))
        counts.append(streamer._lane.asked - before)
    assert counts[1] < counts[0]
    assert counts[2] == counts[1]


def test_a_transformer_encoder_of_torch_itself_in_training_and_evaluation() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(2, 6, 32)
    for block in model.layers:
        for parameter in block.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
    plain, output = gradients(model, model(x).square().sum()), model.eval()(x).detach()
    log = residents(streamed(model))
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), output)
        assert same(plain, gradients(model.train(), model(x).square().sum()))
    assert max(log) == 2


def test_a_state_dict_has_the_weights_without_bringing_them() -> None:
    workload = WORKLOADS["llama"]
    model = half_frozen(workload)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    streamer = streamed(model)
    gradients(model, loss_of(model, workload.batch(4)))
    resident = resident_bytes(streamer)
    after = model.state_dict()
    assert resident_bytes(streamer) == resident
    assert list(after) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    inner = model.model.layers[3].mlp.state_dict()
    assert torch.equal(inner["up_proj.weight"], before["model.layers.3.mlp.up_proj.weight"])


def test_closing_brings_everything_back_into_the_same_parameters_and_removes_the_hooks() -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    parameters = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    versions = {name: parameter._version for name, parameter in parameters.items()}
    plain = gradients(model, loss_of(model, batch))
    streamer = streamed(model)
    gradients(model, loss_of(model, batch))
    loss = loss_of(model, batch)  # a forward without its backward
    streamer.close()
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter._version == versions[name]
        assert torch.equal(parameter, before[name])
    assert not any(
        m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in model.modules()
    )
    assert same(plain, gradients(model, loss))
    assert same(plain, gradients(model, loss_of(model, batch)))


def test_where_the_device_has_no_room_for_all_of_them_closing_leaves_them_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    streamer = streamed(model)
    gradients(model, loss_of(model, batch))
    out_of_memory_at(monkeypatch, streamer, 3)
    streamer.close()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_running_out_of_memory_half_way_through_a_block_is_recovered_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    plain = gradients(model, loss_of(model, batch))
    streamer = streamed(model)
    gradients(model, loss_of(model, batch))
    with monkeypatch.context() as limited:
        out_of_memory_at(limited, streamer, 3)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model, batch)
    assert same(plain, gradients(model, loss_of(model, batch)))


def out_of_memory_at(monkeypatch: pytest.MonkeyPatch, streamer: BlockStreamer, number: int) -> None:
    """A block finds no memory."""

    def filled() -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(streamer.blocks[number].memories[-1], "filled", filled)


# dynamo looks at that of every input, also without streaming
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_compiled_blocks_keep_one_piece(checkpoint_every: int) -> None:
    workload = WORKLOADS["plain"]
    model, batch = half_frozen(workload), workload.batch(4)
    plain = gradients(model, loss_of(model, batch))
    torch.compiler.reset()
    if checkpoint_every:
        checkpointed(model, checkpoint_every)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    log = residents(streamed(model, whole=True))
    for _ in range(2):
        assert same(plain, gradients(model, loss_of(model, batch)))
    assert max(log) == 2
    torch.compiler.reset()


@pytest.fixture
def deep() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    # 64 MiB each
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(16)))
    for block in model:
        block[0].weight.requires_grad_(False)
    yield model.to(device), torch.randn(256, 4096, device=device)
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_on_a_card_the_peak_falls_by_all_blocks_but_two(
    deep: tuple[nn.Module, torch.Tensor],
) -> None:
    model, x = deep

    def step() -> tuple[int, list[torch.Tensor]]:
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        grads = gradients(model, model(x).square().mean())
        return torch.cuda.max_memory_allocated(), [grad.clone() for grad in grads]

    plain_peak, plain = step()
    streamer = BlockStreamer(model, repeated_blocks(model), CopyLane.of(x.device))
    step()  # which hands the weights over
    for _ in range(3):
        peak, grads = step()
        assert same(plain, grads)
    assert plain_peak - peak == pytest.approx(14 * 4096 * 4096 * 4, rel=0.1)
    streamer.close()
    assert same(plain, step()[1])


def updated_in_backward(model: nn.Module) -> None:
    """Let each backward take a step of plain descent."""

    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


Run = tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]
TRAINED: dict[str, Run] = {
    **{
        name: (workload.model, lambda model, workload=workload: loss_of(model, workload.batch(4)))
        for name, workload in WORKLOADS.items()
    },
    **{
        kind.__name__: (kind, lambda model: torch.tanh(0.1 * model(torch.ones(8, 32))))
        for kind in (Stashed, Backwards, Parts)
    },
}


def trained(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind().requires_grad_()
    updated_in_backward(model)
    return model


@pytest.mark.parametrize("checkpoint_every", [0, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_come_back_as_the_backward_left_them(
    name: str, checkpoint_every: int
) -> None:
    kind, loss = TRAINED[name]
    plain, model = trained(kind), trained(kind)
    streamer = streamed(model, updated="device")
    for each in (plain, model):
        if checkpoint_every and name in WORKLOADS:
            checkpointed(each, checkpoint_every)
    log = residents(streamer)
    for _ in range(3):
        expected, found = loss(plain), loss(model)
        assert torch.equal(expected, found)
        expected.backward()
        found.backward()
    # one on its way to the host, and one that was fetched in vain
    assert max(log) == 3 + (name == "Backwards")
    weights = dict(plain.named_parameters())
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights.get(key, tensor)), key
    for key, parameter in model.named_parameters():
        assert torch.equal(streamer.value_of(parameter), weights[key]), key
    assert resident_bytes(streamer) == 0


def test_what_is_written_to_a_trained_weight_is_streamed_from_then_on_and_left_when_it_is_closed() -> (
    None
):
    kind, loss = TRAINED["plain"]
    model, other = trained(kind), trained(kind)
    streamer = streamed(model, updated="device")
    parameters = list(model.parameters())
    loss(model).backward()
    with torch.no_grad():
        for parameter, start in zip(parameters, other.parameters(), strict=True):
            streamer.value_of(parameter).copy_(start)
    loss(model).backward()
    loss(other).backward()
    assert torch.equal(loss(model), loss(other))
    streamer.close()
    for parameter, mine, theirs in zip(
        parameters, model.parameters(), other.parameters(), strict=True
    ):
        assert parameter is mine
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("checkpoint_every", [0, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_follow_trained_weights_to_the_host_and_add_up_there(
    name: str, checkpoint_every: int
) -> None:
    kind, loss = TRAINED[name]
    models = [kind().requires_grad_() for _ in range(2)]
    plain, model = models
    model.load_state_dict(plain.state_dict())
    streamer = streamed(model, updated="host")
    for each in models:
        if checkpoint_every and name in WORKLOADS:
            checkpointed(each, checkpoint_every)
    log: list[int] = []
    for block in repeated_blocks(model):
        block.register_forward_hook(lambda *_: log.append(gradient_bytes(streamer)))
        next(block.parameters()).register_hook(lambda _: log.append(gradient_bytes(streamer)))
    weights = dict(plain.named_parameters())
    for _ in range(2):
        for _ in range(3):  # micro-batches
            expected, found = loss(plain), loss(model)
            assert torch.equal(expected, found)
            expected.backward()
            found.backward()
        at_rest = streamer.host_params()
        assert resident_bytes(streamer) == gradient_bytes(streamer) == 0
        for key, parameter in model.named_parameters():
            there = at_rest.get(parameter, parameter)
            assert (there.grad is None) == (weights[key].grad is None), key
            for each in (there, weights[key]):
                if each.grad is not None:
                    assert torch.equal(there.grad, weights[key].grad), key
                    each.data.sub_(each.grad, alpha=0.1)
        for each in models:
            each.zero_grad()
    of_block = streamed_bytes(streamer) // len(repeated_blocks(model))
    assert 0 < max(log) <= 3 * of_block
    assert torch.equal(loss(plain), loss(model))
    streamer.close()
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[key]), key


@pytest.mark.parametrize("room", [True, False])
def test_gradients_at_hand_when_it_is_closed_stay(
    monkeypatch: pytest.MonkeyPatch, *, room: bool
) -> None:
    kind, loss = TRAINED["plain"]
    model = trained_on_host(kind)
    loss(model).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    streamer = streamed(model, updated="host")
    loss(model).backward()
    if not room:
        out_of_memory_at(monkeypatch, streamer, 3)
    streamer.close()
    assert same([parameter.grad for parameter in model.parameters()], expected)


def trained_on_host(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().requires_grad_()


class Joined(nn.Module):
    """A block of two weights whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(32, 32)) for _ in range(2))
        self.last = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x @ torch.cat([self.one, self.other]).view(2, 32, 32).sum(0))


class JoinedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Joined() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_a_gradient_that_is_a_part_of_something_larger_rests_by_itself() -> None:
    plain, model = JoinedBlocks(), JoinedBlocks()
    model.load_state_dict(plain.state_dict())
    plain(torch.ones(4, 32)).backward()
    assert next(plain.parameters()).grad.untyped_storage().nbytes() == 2 * 4 * 32 * 32
    plain(torch.ones(4, 32)).backward()
    streamer = streamed(model, updated="host")
    for _ in range(2):
        model(torch.ones(4, 32)).backward()
    found = [there.grad for there in streamer.host_params().values()]
    assert same(found, [parameter.grad for parameter in plain.parameters()])
