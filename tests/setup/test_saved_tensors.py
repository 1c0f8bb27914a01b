"""Saved tensors on the host: the same loss and gradients, weights left alone, everything once, nothing lost."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.core.workload import Workload
from autofit.hardware.tracker import StorageTracker
from autofit.setup.host_copies import CopyLane
from autofit.setup.saved_tensors import SavedTensorsOnHost
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.step import accumulate
from tests import tiny
from tests.late_lane import LateLane

SMALLEST = 256
WORKLOADS = {
    "llama": tiny.llama_workload(),
    "plain": tiny.transformer_workload(),
    "conv": tiny.conv_workload(),
}


def offloading(
    model: nn.Module, *, lane: CopyLane | None = None, window: int = 4096
) -> SavedTensorsOnHost:
    return SavedTensorsOnHost(model, lane or CopyLane(None), smallest=SMALLEST, window=window)


def packs(offload: SavedTensorsOnHost) -> list[tuple[torch.Tensor, bool]]:
    """What is given to the hooks from now on, and whether it was taken."""
    seen: list[tuple[torch.Tensor, bool]] = []
    pack = offload._pack

    def noted(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        seen.append((tensor, packed is not tensor))
        return packed

    offload._pack = noted
    return seen


def with_dropout(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    model = workload.model()
    if isinstance(model, tiny.Transformer):
        for block in model.blocks:
            block.mlp.append(nn.Dropout(0.5))
    return model


def stepped(
    workload: Workload, knobs: dict[str, Any], **given: Any
) -> tuple[list[torch.Tensor], Any]:
    """Loss and gradients of two accumulated batches; what was offloaded, if `given` says how."""
    model = with_dropout(workload)
    setup = build(workload, knobs, tiny.CPU, model=model)
    offload = offloading(model, **given) if given else None
    if offload:
        setup.forward_contexts.append(offload.hooks)
    torch.manual_seed(1)
    losses = [accumulate(setup, workload.batch(4)) for _ in range(2)]
    return [*losses, *(parameter.grad for _, parameter in setup.trainable())], offload


@pytest.mark.parametrize(
    "knobs", [{}, {"activation_checkpointing": "full"}, {"micro_batch_size": 2}]
)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("window", [0, 4096])
def test_loss_and_gradients_are_the_same_to_the_bit(
    workload: Workload, knobs: dict[str, Any], window: int
) -> None:
    plain, _ = stepped(workload, knobs)
    moved, offload = stepped(workload, knobs, lane=LateLane(), window=window)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert offload.packed_bytes > 0
    assert not offload._live
    assert not offload._on_device
    assert not offload._by_storage


def test_what_is_packed_comes_back_but_for_the_window() -> None:
    _, offload = stepped(WORKLOADS["plain"], {}, window=0)
    largest = 4 * 12 * 128 * 4  # samples, tokens, the inside of the MLP
    # the last of each forward never left
    assert 0 < offload.packed_bytes - offload.fetched_bytes <= 2 * largest
    _, offload = stepped(WORKLOADS["plain"], {}, window=10**9)
    assert offload.fetched_bytes == 0


def test_buffers_are_used_again_from_step_to_step() -> None:
    workload = WORKLOADS["llama"]
    setup = build(workload, {"micro_batch_size": 2}, tiny.CPU, model=workload.model())
    offload = offloading(setup.model)
    setup.forward_contexts.append(offload.hooks)
    held = []
    for _ in range(4):
        accumulate(setup, workload.batch(4))
        held.append(offload.pool.held_bytes)
    assert held[0] > 0
    assert len(set(held[1:])) == 1
    # all are back
    assert sum(len(free) * size for size, free in offload.pool._free.items()) == held[-1]


@pytest.mark.parametrize(
    "knobs", [{}, {"precision": "bf16-mixed"}, {"lora_rank": 4, "lora_targets": "all-linear"}]
)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_weights_their_views_and_autocast_copies_are_left_alone(
    workload: Workload, knobs: dict[str, Any]
) -> None:
    setup = build(workload, knobs, tiny.CPU, model=workload.model())
    offload = offloading(setup.model)
    seen = packs(offload)
    setup.forward_contexts.append(offload.hooks)
    accumulate(setup, workload.batch(4))
    taken = [tensor for tensor, was_taken in seen if was_taken]
    assert taken
    assert not any(is_of_weight(tensor, setup.model) for tensor in taken)
    assert any(is_of_weight(tensor, setup.model) for tensor, was_taken in seen if not was_taken)


def is_of_weight(tensor: torch.Tensor, model: nn.Module) -> bool:
    """By its values, in whatever format or orientation."""
    rows = tensor.flatten().sort().values
    alike = [weight for weight in model.parameters() if weight.numel() == rows.numel()]
    return any(
        torch.equal(weight.detach().flatten().to(rows.dtype).sort().values, rows)
        for weight in alike
    )


def test_quantised_weights_are_left_alone() -> None:
    workload = WORKLOADS["llama"]
    setup = build(
        workload, {"lora_rank": 4, "lora_targets": "attention", "quantization": "int8"}, tiny.CPU
    )
    offload = offloading(setup.model)
    seen = packs(offload)
    with offload.hooks():
        setup.model(**workload.batch(4))
    assert not any(was_taken and tensor.dtype == torch.int8 for tensor, was_taken in seen)


def test_an_input_that_three_layers_save_is_moved_once() -> None:
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    offload = offloading(layers)
    x = torch.randn(8, 32, requires_grad=True)
    with offload.hooks():
        y = sum(layer(x) for layer in layers)
    assert offload.packed_bytes == 8 * 32 * 4
    y.sum().backward()
    torch.testing.assert_close(
        x.grad, sum(torch.ones(8, 32) @ layer.weight for layer in layers).detach()
    )


def test_but_again_when_it_was_changed_in_between() -> None:
    offload = offloading(nn.Linear(1, 1))
    scale = torch.full((64,), 2.0, requires_grad=True)
    x = torch.ones(64)
    with offload.hooks():
        y = x * scale
        offload._leave_device(offload._count)  # else it is caught, see below
        x.add_(1)
        z = x * scale
    assert offload.packed_bytes == 2 * 64 * 4
    (y + z).sum().backward()
    assert scale.grad.eq(1 + 2).all()


def test_a_tensor_that_is_changed_while_it_may_still_be_copied_is_an_error_as_in_autograd() -> None:
    offload = offloading(nn.Linear(1, 1))
    scale = torch.full((64,), 2.0, requires_grad=True)
    x = torch.ones(64)
    with offload.hooks():
        y = x * scale
        x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_views_of_one_storage_go_together_and_keep_their_strides() -> None:
    offload = offloading(nn.Linear(1, 1), window=0)
    whole = torch.randn(4, 12, 96)
    q, k, v = (
        part.unflatten(-1, (2, 16)).transpose(1, 2).requires_grad_()
        for part in whole.chunk(3, dim=-1)
    )
    with offload.hooks():
        offload_of = [offload._pack(part.detach()) for part in (q, k, v)]
    assert offload.packed_bytes == whole.nbytes
    for packed, part in zip(reversed(offload_of), (v, k, q), strict=True):
        tensor = offload._unpack(packed)
        assert tensor.stride() == part.stride()
        assert torch.equal(tensor, part)


def test_what_enters_a_checkpointed_block_is_all_that_is_packed() -> None:
    workload = WORKLOADS["plain"]
    _, offload = stepped(workload, {"activation_checkpointing": "full"}, window=0)
    tokens = 4 * 12
    inputs = 3 * tokens * 32 * 4
    head = tokens * (32 + 48) * 4  # what enters it, and the loss's log-probabilities
    numbers = 2 * tokens * 8  # tokens and targets
    assert offload.packed_bytes == 2 * (inputs + head + numbers)  # two batches


@pytest.mark.parametrize("seed", range(4))
def test_the_graph_may_be_gone_through_again_and_in_any_order(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    offload = offloading(model, lane=LateLane(), window=2048)
    x = torch.randn(8, 32, requires_grad=True)
    with offload.hooks():
        outputs = [layer(x).tanh() * x.exp() for layer in model]
    for number in torch.randperm(4).tolist() * 2:
        (grad,) = torch.autograd.grad(outputs[number].sum(), x, retain_graph=True)
        (plain,) = torch.autograd.grad((model[number](x).tanh() * x.exp()).sum(), x)
        assert torch.equal(grad, plain)


def test_nothing_is_left_of_a_forward_that_fails_or_is_never_followed_by_a_backward() -> None:
    model = tiny.Transformer()
    offload = offloading(model, lane=LateLane())
    batch = tiny.transformer_workload().batch(4)
    with offload.hooks():
        loss = model(**batch)
    assert len(offload._live) > 10
    del loss
    model.blocks[2].forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError), offload.hooks():
        model(**batch)
    gc.collect()
    assert not offload._live
    assert not offload._on_device
    assert (
        sum(len(free) * size for size, free in offload.pool._free.items())
        == offload.pool.held_bytes
    )


def test_an_evaluation_packs_nothing() -> None:
    workload = WORKLOADS["plain"]
    setup = build(workload, {}, tiny.CPU, model=workload.model())
    offload = offloading(setup.model)
    setup.forward_contexts.append(offload.hooks)
    assert evaluate(setup, [workload.batch(4)]) > 0
    assert offload.packed_bytes == 0


class DeviceTracker(StorageTracker):
    """Does not count the host's buffers, which on a CPU are the same memory."""

    def __init__(self, hosts: list[torch.Tensor]) -> None:
        super().__init__()
        self.hosts = {buffer.untyped_storage()._cdata for buffer in hosts}

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.hosts:
            super()._count(storage)


def test_after_the_forward_the_device_holds_less_by_what_was_packed() -> None:
    workload = tiny.mlp_workload()
    model, (features, classes) = workload.model(), workload.batch(1024)
    offload = offloading(model, window=0)

    def live(hosts: list[torch.Tensor], hooks: Any) -> int:
        with DeviceTracker(hosts) as tracker:
            tracker.see([*model.parameters(), *model.buffers()])
            with hooks:
                loss = tiny.classify(model, (features.clone(), classes))
            live = tracker.live
            loss.backward()
        return live

    plain = live([], torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
    live([], offload.hooks())  # makes the buffers
    before = offload.packed_bytes
    hosts = [buffer for free in offload.pool._free.values() for buffer in free]
    assert (plain - live(hosts, offload.hooks())) == pytest.approx(before, rel=0.1)
    layers = 4 * 1024 * (48 + 96) * 4  # a layer's input and what is between its two matrices
    # what enters it, the loss's log-probabilities, the classes
    head = 1024 * (48 + 10) * 4 + 1024 * 8
    assert before == layers + head


def test_fake_tensors_are_moved_too() -> None:
    with FakeTensorMode():
        model = tiny.Transformer()
        offload = offloading(model)
        batch = {key: torch.zeros(4, 12, dtype=torch.long) for key in ("tokens", "targets")}
        with offload.hooks():
            loss = model(**batch)
        loss.backward()
    assert 0 < offload.fetched_bytes < offload.packed_bytes


@pytest.fixture
def wide() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12)]
    # 64 MiB after every operation
    yield (nn.Sequential(*layers).to(device), torch.randn(16384, 1024, device=device))
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 2**28])
def test_on_a_card_the_peak_falls_by_what_is_packed(
    wide: tuple[nn.Module, torch.Tensor], window: int
) -> None:
    model, x = wide
    offload = SavedTensorsOnHost(model, CopyLane.of(x.device), window=window)

    def step(hooks: Any) -> tuple[int, list[torch.Tensor]]:
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with hooks:
            loss = model(x).square().mean()
        loss.backward()
        return torch.cuda.max_memory_allocated(), [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters()),
        ]

    plain_peak, plain = step(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    for _ in range(3):
        packed = -offload.packed_bytes
        peak, moved = step(offload.hooks())
        packed += offload.packed_bytes
        assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    one = x.nbytes
    # Two windows at the turn (what has not left, what comes back), and some operations' own results.
    assert plain_peak - peak >= packed - 2 * max(window, one) - 4 * one
    assert packed >= 22 * one
