"""What kernels hold inside, compared with real calls of shapes that the constraints were not read off."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from autofit.estimate.kernels_cpu import bytes_inside
from autofit.hardware.tracker import AllocationRecord

torch.set_num_threads(1)

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the layouts are those of AVX-512"
)


class Asked(TorchDispatchMode):
    """What the constraints say of the calls inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        nbytes = bytes_inside(func, args, result)
        if nbytes or "convolution" in func._schema.name:
            self.found.append(nbytes + sum(each.nbytes for each in tree_iter(result) if isinstance(each, torch.Tensor)))
        return result


def allocated(action: Callable[[], Any]) -> tuple[int, Any]:
    with AllocationRecord() as record:
        result = action()
    return record.peak, result


def held(layer: nn.Module, inputs: torch.Tensor) -> tuple[list[int], list[int]]:
    """Inside the forward and the backward: by the constraints, and really."""
    gradient = torch.ones_like(layer(inputs))
    asked = Asked()
    with asked:
        layer(inputs).backward(gradient)
    layer.zero_grad()
    inputs.grad = None
    forward, outputs = allocated(lambda: layer(inputs))
    backward, _ = allocated(lambda: outputs.backward(gradient))
    return asked.found, [forward, backward]


@needs_avx512
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("batch", "entering", "leaving", "size", "kernel", "stride"),
    [
        (6, 80, 48, 26, 3, 1),  # blocks of 16 channels
        (6, 56, 72, 26, 3, 1),  # padded to blocks
        (5, 112, 160, 18, 3, 1),
        (6, 96, 224, 30, 3, 2),
        (6, 80, 176, 22, 1, 1),
        (4, 48, 80, 26, 5, 1),
        (6, 3, 80, 60, 7, 2),  # images
        (6, 3, 96, 56, 14, 14),
    ],
)
def test_convolutions_of_other_shapes(
    batch: int, entering: int, leaving: int, size: int, kernel: int, stride: int, dtype: torch.dtype
) -> None:
    padding = 0 if kernel == stride else kernel // 2
    layer = nn.Conv2d(entering, leaving, kernel, stride=stride, padding=padding).to(dtype)
    inputs = torch.randn(batch, entering, size, size, dtype=dtype).requires_grad_(entering > 3)
    constraints, real = held(layer, inputs)
    assert constraints[0] == pytest.approx(real[0], rel=0.02)
    assert constraints[1] == pytest.approx(real[1], rel=0.10)


def test_a_convolution_that_pytorch_computes_itself_copies_columns() -> None:
    layer = nn.Conv2d(24, 40, 3, padding=1)
    constraints, real = held(layer, torch.randn(1, 24, 20, 20, requires_grad=True))
    assert constraints == pytest.approx(real, rel=0.01)


@needs_avx512
@pytest.mark.parametrize("shape", [(384, 448, 640), (96, 1152, 288), (1536, 128, 896)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_in_bf16(shape: tuple[int, int, int], transposed: bool) -> None:
    rows, summed, columns = shape
    first = torch.randn((summed, rows) if transposed else (rows, summed), dtype=torch.bfloat16)
    first = first.t() if transposed else first
    second = torch.randn(summed, columns, dtype=torch.bfloat16)
    real, product = allocated(lambda: torch.mm(first, second))
    assert real > product.nbytes
    rule = bytes_inside(torch.ops.aten.mm.default, (first, second), product)
    assert rule + product.nbytes == pytest.approx(real, rel=0.1)
    assert bytes_inside(torch.ops.aten.addmm.default, (second[0], first, second), product) == rule


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="oneDNN multiplies where AVX-512 is")
@pytest.mark.parametrize("shape", [(384, 448, 640), (96, 1152, 288)], ids=str)
def test_products_in_bf16_without_avx512_hold_nothing_but_their_results(shape: tuple[int, int, int]) -> None:
    rows, summed, columns = shape
    first = torch.randn(rows, summed, dtype=torch.bfloat16)
    second = torch.randn(summed, columns, dtype=torch.bfloat16)
    real, product = allocated(lambda: torch.mm(first, second))
    assert bytes_inside(torch.ops.aten.mm.default, (first, second), product) == real - product.nbytes == 0


@pytest.mark.parametrize("length", [96, 320, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_by_flash(length: int, dtype: torch.dtype) -> None:
    tensors = [torch.randn(2, length, 3, 80, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    asked = Asked()

    def attend() -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)

    gradient = torch.ones_like(attend())
    with asked:
        torch.autograd.grad(attend(), tensors, gradient)
    forward, outputs = allocated(attend)
    backward, _ = allocated(lambda: torch.autograd.grad(outputs, tensors, gradient))
    constraints = [each for each in asked.found if each > tensors[0].nbytes]
    assert constraints == pytest.approx([forward, backward], rel=0.01 if dtype == torch.float32 else 0.12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_of_the_8_bit_optimizer(dtype: torch.dtype) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.randn(300, 320, dtype=dtype))
    optimizer = bitsandbytes.optim.AdamW8bit([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    asked = Asked()
    with asked:
        optimizer.step()
    real, _ = allocated(optimizer.step)
    assert asked.found == pytest.approx([real], rel=0.02)


@pytest.mark.parametrize("dims", [None, (-1,), (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_mean(dims: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    inputs = torch.ones(40, 50, 60, dtype=dtype)
    asked = Asked()
    with asked:
        inputs.mean(dims)
    real, _ = allocated(lambda: inputs.mean(dims))
    assert asked.found == ([pytest.approx(real, abs=32)] if dtype == torch.bfloat16 else [])


def test_operands_of_two_formats() -> None:
    sums, more = torch.zeros(70, 80), torch.ones(70, 80, dtype=torch.bfloat16)
    real, _ = allocated(lambda: sums.add_(more))
    assert bytes_inside(torch.ops.aten.add_.Tensor, (sums, more), sums) == real == 70 * 80 * 4
    real, _ = allocated(lambda: more.mul_(sums))
    assert bytes_inside(torch.ops.aten.mul_.Tensor, (more, sums), more) == real == 2 * 70 * 80 * 4
    assert bytes_inside(torch.ops.aten.add_.Tensor, (sums, sums), sums) == 0
    assert bytes_inside(torch.ops.aten.mul.Tensor, (more, 2.0), more) == 0


def test_products_in_fp32_hold_nothing_but_their_results() -> None:
    first, second = torch.randn(64, 128), torch.randn(128, 96)
    real, product = allocated(lambda: torch.mm(first, second))
    assert real == product.nbytes
    assert bytes_inside(torch.ops.aten.mm.default, (first, second), product) == 0
