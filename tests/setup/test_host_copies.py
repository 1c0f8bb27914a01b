"""Copies: in order, flat bytes that leave versions alone, and host buffers that are used again."""

import pytest
import torch
from torch import nn

from autofit.setup.host_copies import CopyLane, HostPool, Layout, flat_bytes, pinning, plain_tensors

SHAPES = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "part": lambda x: x[2:5, 1:3],
    "expanded": lambda x: x[:, :1].expand(-1, 9),
    "other type": lambda x: x.view(torch.int32)[1:],
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_layout_on_copied_bytes_is_the_tensor_again(shape: object) -> None:
    tensor = shape(torch.randn(6, 4))
    copied = Layout.of(tensor).on(flat_bytes(tensor).clone())
    assert torch.equal(copied, tensor)
    assert copied.stride() == tensor.stride()
    assert copied.dtype == tensor.dtype


def test_writing_flat_bytes_is_seen_in_the_tensor_and_not_in_its_version() -> None:
    tensor = nn.Parameter(torch.ones(3))
    flat_bytes(tensor).zero_()
    assert tensor.eq(0).all()
    assert tensor._version == 0


def test_buffers_are_used_again_for_any_size_of_the_same_power_of_two() -> None:
    pool = HostPool(CopyLane(None))
    first = pool.take(1000)
    assert first.numel() == 1024
    pool.give(first)
    assert pool.take(513) is first
    assert pool.take(1024) is not first
    assert pool.take(1025).numel() == 2048
    assert pool.held_bytes == 1024 + 1024 + 2048


def test_without_a_stream_copies_are_done_at_once() -> None:
    lane, to = CopyLane(None), torch.zeros(2)
    ticket = lane.copy([(to, torch.ones(2))])
    assert to.eq(1).all()
    lane.wait(ticket)
    assert not lane.pinned


def test_a_quantised_weight_is_made_of_plain_tensors() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(32, 32)
    assert list(plain_tensors(layer.weight)) == [layer.weight]
    quantize_(layer, Int8WeightOnlyConfig(version=2))
    parts = list(plain_tensors(layer.weight))
    assert len(parts) >= 2
    assert max(part.nbytes for part in parts) == 32 * 32


@pytest.mark.gpu
def test_copies_beside_the_computation_are_waited_for() -> None:
    device = torch.device("cuda")
    lane = CopyLane.of(device)
    pool = HostPool(lane)
    assert lane.pinned
    host = pool.take(2**26)
    assert host.is_pinned()
    for value in range(20):
        source = torch.zeros(2**26, dtype=torch.uint8, device=device)
        torch.cuda._sleep(10**6)
        source.fill_(value)
        out = lane.copy([(host, source)])
        back = torch.empty_like(source)
        lane.wait(out)
        del source
        lane.wait(lane.copy([(back, host)]))
        assert back.eq(value).all()


@pytest.mark.parametrize(("code", "told"), [(2, MemoryError), (700, torch.AcceleratorError)])
def test_memory_that_cannot_be_pinned_is_the_hosts(code: int, told: type[Exception]) -> None:
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = code
    with pytest.raises(told), pinning():
        raise error


@pytest.mark.gpu
def test_on_a_card_more_than_the_host_has_cannot_be_pinned() -> None:
    lane = CopyLane.of(torch.device("cuda"))
    with pytest.raises(MemoryError, match="pinned"):
        lane.host_buffer(1 << 47)
