"""Stand-ins for bitsandbytes' kernels: the same results as theirs, and on CUDA the same bytes meanwhile."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from autofit.core.workload import Workload
from autofit.estimate.library_kernels import library_kernels
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.step_trace import Trace
from tests.estimate.traced import AMPERE, labelled, peak, traced, tracked
from tests.tiny import CPU, gpt2_workload, llama_workload

bitsandbytes = pytest.importorskip("bitsandbytes")
LORA = {"lora_rank": 4}
_WIDE = {"hidden_size": 64, "intermediate_size": 256}  # blocks of 64 weights in every layer


@pytest.mark.parametrize(
    ("value", "precision"),
    [("int8", "fp32"), ("nf4", "bf16"), ("int8", "bf16-mixed"), ("nf4-dq", "fp32")],
)
def test_a_traced_step_of_quantised_layers_takes_what_a_probe_reports(
    value: str, precision: str
) -> None:
    workload = llama_workload(**_WIDE)
    knobs = {**LORA, "quantization": value, "precision": precision}
    # bitsandbytes' table of codes for scales of scales belongs to no trace.
    table = 4 * 256 if value == "nf4-dq" else 0
    assert peak(traced(workload, **knobs)) == pytest.approx(tracked(workload, knobs), abs=table)


def test_layers_with_a_transposed_weight_are_traced_too() -> None:
    knobs = {**LORA, "quantization": "nf4"}
    assert peak(traced(gpt2_workload(), **knobs)) == tracked(gpt2_workload(), knobs)


def _bytes_of_linears(**knobs: Any) -> int:
    """Of the weights of a model on a GPU, those that its quantised layers hold."""
    workload = llama_workload(**_WIDE)
    plain = labelled(traced(workload, AMPERE, precision="bf16", **LORA), "parameters")
    return (
        labelled(traced(workload, AMPERE, precision="bf16", **LORA, **knobs), "parameters") - plain
    )


def test_a_weight_takes_the_bytes_of_its_format() -> None:
    squares, wide = 2 * 4, 2 * 3  # layers of 64 x 64 and of 64 x 256, in two blocks
    elements = squares * 64 * 64 + wide * 64 * 256
    blocks, layers = elements // 64, squares + wide
    rows = squares * 64 + 2 * (256 + 256 + 64)
    assert (
        _bytes_of_linears(quantization="nf4")
        == elements // 2 + 4 * blocks + layers * 4 * 16 - 2 * elements
    )
    nested = squares * 1 + wide * 1  # at most 256 scales each: one scale of them
    tables = layers * (4 * 16 + 4 * 256 + 4)
    assert (
        _bytes_of_linears(quantization="nf4-dq")
        == elements // 2 + blocks + 4 * nested + tables - 2 * elements
    )
    assert _bytes_of_linears(quantization="int8") == elements + 4 * rows - 2 * elements


def test_checkpointing_on_a_gpu_does_not_free_what_int8_layers_hold() -> None:
    """They keep their inputs out of autograd's sight; 4-bit layers do not."""
    knobs = {**LORA, "activation_checkpointing": "full", "precision": "bf16"}
    workload = llama_workload(32, 64)
    int8, nf4 = (traced(workload, AMPERE, quantization=value, **knobs) for value in ("int8", "nf4"))
    # of two blocks: into attention, out of it, and into the two of the MLP
    inputs = 32 * 64 * 2 * 2 * (3 * 32 + 128)
    assert (
        peak(int8) - labelled(int8, "parameters")
        > peak(nf4) - labelled(nf4, "parameters") + inputs // 2
    )


def _quantised(double: bool) -> tuple[torch.Tensor, Any]:
    weight = torch.randn(96, 64)
    packed, state = bitsandbytes.functional.quantize_4bit(
        weight, compress_statistics=double, quant_type="nf4"
    )
    return packed, state


@pytest.mark.parametrize("bias", [None, torch.ones(96)])
@pytest.mark.parametrize("double", [False, True])
def test_a_4_bit_product_is_that_of_the_library(double: bool, bias: torch.Tensor | None) -> None:
    packed, state = _quantised(double)
    inputs = torch.randn(2, 3, 64)
    scales = state.state2.absmax if double else state.absmax
    nested = (state.absmax, state.state2.code, state.offset) if double else (None, None, None)
    given = (inputs, packed, state.shape, scales, state.blocksize, state.quant_type, bias, *nested)
    kernel = library_kernels(CPU)["bitsandbytes::gemm_4bit"]
    with FlopCounterMode(display=False) as counter:
        ours = kernel(*given)
    torch.testing.assert_close(ours, torch.ops.bitsandbytes.gemm_4bit(*given))
    assert counter.get_total_flops() == 2 * 6 * 64 * 96


def test_int8_products_on_a_gpu_give_what_the_library_gives() -> None:
    inputs = torch.randn(32, 16, dtype=torch.bfloat16)
    kernels = library_kernels(AMPERE)
    rows, scales, outliers = kernels["bitsandbytes::int8_vectorwise_quant"](inputs.half(), 6.0)
    theirs = torch.ops.bitsandbytes.int8_vectorwise_quant(inputs.half(), 6.0)
    results = [(each.shape, each.dtype) for each in (rows, scales, outliers)]
    assert results == [(each.shape, each.dtype) for each in theirs]
    weight, weight_scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(
        torch.randn(8, 16).half()
    )
    given = (inputs, theirs[0], weight, theirs[1], weight_scales, theirs[2], torch.ones(8))
    ours, none = kernels["bitsandbytes::int8_mixed_scaled_mm"](*given)
    output, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(*given)
    assert (ours.shape, ours.dtype, none.numel()) == (output.shape, output.dtype, 0)


class _Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(8, 12, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0].square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "steps"), [("LSTM", 20), ("LSTM", 200), ("GRU", 20), ("RNN", 20)])
def test_a_recurrent_layer_takes_what_a_probe_reports(kind: str, steps: int) -> None:
    """oneDNN's LSTM keeps a workspace that PyTorch's fake tensors know nothing of."""
    workload = Workload(
        lambda: _Recurrent(kind), lambda n: {"x": torch.ones(n, steps, 8)}, effective_batch_size=4
    )
    assert peak(traced(workload)) == pytest.approx(tracked(workload, {}), rel=1e-3)


def test_how_fast_a_recurrent_layer_is_can_be_measured() -> None:
    """Its backward crashes on a workspace with made-up values."""
    workload = Workload(
        lambda: _Recurrent("LSTM"), lambda n: {"x": torch.ones(n, 64, 8)}, effective_batch_size=64
    )
    recorded = traced(workload)
    lines = recorded.calls.measured(UNKNOWN)
    assert not [name for name in lines if "mkldnn_rnn_layer_backward" in name]
    assert sum(cost.flops for cost in recorded.costs) == pytest.approx(
        2 * 3 * 64 * 64 * 48 * (8 + 12 + 12 + 12), rel=0.01
    )


def test_a_recurrent_layer_of_a_card_keeps_what_its_steps_keep_and_that_is_said() -> None:
    def of(steps: int) -> Trace:
        batch = lambda n: {"x": torch.ones(n, steps, 8)}  # noqa: E731
        return traced(Workload(lambda: _Recurrent("LSTM"), batch, effective_batch_size=4), AMPERE)

    card, state = of(51), 4 * 12 * 4  # bytes of one layer's state
    assert torch.backends.mkldnn.is_available() == torch._C._get_mkldnn_enabled()
    # in each step of two layers four gates, a cell, an output
    assert peak(card) - peak(of(1)) > 50 * 2 * 6 * state
    assert card.assumptions == (
        "recurrent layers were traced step by step: cuDNN's kernels are faster, and keep what only cuDNN knows.",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_shape_and_layout_of_pytorchs(dtype: torch.dtype) -> None:
    """Of rows by each group's matrix; the gradient of these; and of as many matrices on both sides."""
    ends = torch.tensor([8, 24], dtype=torch.int32)
    rows, weights = torch.randn(24, 16, dtype=dtype), torch.randn(2, 16, 8, dtype=dtype)
    kernel = library_kernels(CPU)["aten::_grouped_mm"]
    for given in (
        (rows, weights, ends),
        (rows.t(), torch.randn(24, 8, dtype=dtype), ends),
        (weights.mT, weights),
    ):
        ours, theirs = kernel(*given), torch.ops.aten._grouped_mm(*given)
        assert (ours.shape, ours.stride(), ours.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_a_loss_that_keeps_the_losses_of_its_elements_takes_what_a_probe_reports(
    loss: str, reduction: str
) -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.layer(x)
            total = getattr(functional, loss)(made.sigmoid(), x, reduction=reduction).mean()
            return total + made.square().mean()  # type: ignore[no-any-return]

    workload = Workload(Regression, lambda n: {"x": torch.ones(n, 64)}, effective_batch_size=64)
    assert peak(traced(workload)) == tracked(workload, {})
