"""Fake tensors made without PyTorch's checks are those that it makes."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from autofit.estimate.quick_fakes import QuickFakes


def computed() -> list[torch.Tensor]:
    """Views, changes in place, several results, other formats, complex numbers and gradients."""
    base = torch.randn(4, 6)
    weight = torch.nn.Parameter(torch.randn(6, 6, dtype=torch.bfloat16))
    low = base.to(torch.bfloat16)
    product = low @ weight.t()
    halves = product.view(4, 2, 3).transpose(1, 2).chunk(2, dim=-1)
    base.add_(1)
    values, places = product.float().topk(2)
    waves = torch.view_as_complex(torch.randn(4, 3, 2)).conj()
    loss = functional.cross_entropy(product.unsqueeze(0).flatten(0, 1), places[:, 0])
    loss.backward()
    assert weight.grad is not None
    return [
        base,
        weight,
        low,
        product,
        *halves,
        values,
        places,
        waves,
        loss,
        weight.grad,
        product.detach(),
        torch.ops.aten._unsafe_view(product, [24]),
        base[1:, ::2],
    ]


def described(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    """All that is known of fakes; of storages which tensors share them."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (
            type(tensor),
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            storages.index(tensor.untyped_storage()._cdata),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.is_conj(),
        )
        for tensor in tensors
    ]


@pytest.mark.parametrize("inference", [False, True])
def test_results_are_those_of_pytorchs_mode(inference: bool) -> None:
    def all_of(mode: FakeTensorMode) -> list[tuple[Any, ...]]:
        with mode:
            made = computed()
            if inference:
                with torch.inference_mode():
                    made += [made[0].detach().mul(2), made[0].detach()[1:]]
        return described(made)

    expected = all_of(FakeTensorMode())
    quick = QuickFakes()
    for _ in range(3):  # the first time nothing is remembered
        assert all_of(quick) == expected


def test_a_result_holds_what_a_fake_tensor_does() -> None:
    with QuickFakes() as mode:
        made = [torch.ones(2, 3).mul(2) for _ in range(3)]
    first, *others = made
    assert isinstance(first, FakeTensor)
    for other in others:
        assert isinstance(other, FakeTensor)
        assert other.__dict__ == first.__dict__
        assert other.fake_mode is mode
        assert other.untyped_storage()._cdata != first.untyped_storage()._cdata


def test_parts_that_code_names_for_a_profiler_cost_nothing() -> None:
    with QuickFakes(), torch.profiler.record_function("a part"):
        assert torch.ones(3).sum().shape == ()
