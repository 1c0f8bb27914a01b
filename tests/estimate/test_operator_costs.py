"""Floating-point operations of fused attention, against PyTorch's own count where that has one on every version."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry

from autofit.estimate.operator_costs import cost_of, tensors_in

ATEN: Any = torch.ops.aten
SIZES = st.integers(1, 9)


def attention(
    heads: int, key_heads: int, length: int, key_length: int, size: int, value_size: int
) -> Any:
    """Query, key, value and a result without storage."""
    query = torch.empty(2, heads, length, size, device="meta")
    key = torch.empty(2, key_heads, key_length, size, device="meta")
    value = torch.empty(2, key_heads, key_length, value_size, device="meta")
    return query, key, value, torch.empty(2, heads, length, value_size, device="meta")


def flops(func: Any, *args: Any) -> int:
    cost = cost_of(func, args, {}, tensors_in(args), args[0])
    assert cost is not None
    return cost.flops


@given(heads=SIZES, length=SIZES, key_length=SIZES, size=SIZES, value_size=SIZES)
def test_fused_attention_is_counted_as_pytorch_counts_it(
    heads: int, length: int, key_length: int, size: int, value_size: int
) -> None:
    query, key, value, out = attention(heads, heads, length, key_length, size, value_size)
    counted: Any = flop_registry[ATEN._scaled_dot_product_efficient_attention]
    assert flops(
        ATEN._scaled_dot_product_efficient_attention.default, query, key, value
    ) == counted(query, key, value, out_val=out)
    counted = flop_registry[ATEN._scaled_dot_product_efficient_attention_backward]
    backward = ATEN._scaled_dot_product_efficient_attention_backward.default
    assert flops(backward, out, query, key, value) == counted(out, query, key, value, out_val=query)


@pytest.mark.parametrize(
    "name", ["flash_attention", "flash_attention_for_cpu", "efficient_attention"]
)
def test_keys_of_fewer_heads_cost_what_as_many_heads_as_queries_would(name: str) -> None:
    forward = getattr(ATEN, f"_scaled_dot_product_{name}").default
    backward = getattr(ATEN, f"_scaled_dot_product_{name}_backward").default
    query, key, value, out = attention(8, 2, 32, 48, 16, 16)
    _, every_key, every_value, _ = attention(8, 8, 32, 48, 16, 16)
    assert flops(forward, query, key, value) == flops(forward, query, every_key, every_value) > 0
    assert (
        flops(backward, out, query, key, value)
        == flops(backward, out, query, every_key, every_value)
        > 0
    )


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_causal_mask_halves_what_cards_compute(name: str, backward: bool) -> None:
    operator = getattr(ATEN, f"_scaled_dot_product_{name}{'_backward' * backward}").default
    query, key, value, out = attention(8, 8, 32, 32, 16, 16)
    given = [out, query, key, value] if backward else [query, key, value]
    names = [argument.name for argument in operator._schema.arguments]
    rest = [None] * (names.index("is_causal") - len(given))
    assert 2 * flops(operator, *given, *rest, True) == flops(operator, *given, *rest, False) > 0


def test_a_product_added_to_a_wider_sum_is_one_in_its_own_format() -> None:
    total = torch.empty(8, 4, device="meta")
    left, right = (
        torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in ((8, 16), (16, 4))
    )
    given = (total, left, right, torch.float32)
    cost = cost_of(ATEN.addmm.dtype_out, given, {"out": total}, tensors_in(given, total), total)
    assert cost is not None
    assert (cost.kind, cost.dtype, cost.flops) == ("matmul", "bfloat16", 2 * 8 * 16 * 4)


def test_a_grouped_product_costs_each_row_one_matrix() -> None:
    """Of 24 rows, by four matrices of 16 x 8; and the gradient of these."""
    rows, weights, ends = (
        torch.empty(*size, device="meta") for size in ((24, 16), (4, 16, 8), (4,))
    )
    assert flops(ATEN._grouped_mm.default, rows, weights, ends) == 2 * 24 * 16 * 8
    assert flops(ATEN._grouped_mm.default, rows.t(), rows[:, :8], ends) == 2 * 24 * 16 * 8
