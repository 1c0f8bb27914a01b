"""ReLU without its kink."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from autofit.training.smooth_relu import SmoothRelu


@pytest.mark.parametrize(
    "relu", [torch.relu, functional.relu, lambda x: functional.relu(x * 1, inplace=True)]
)
def test_it_is_a_softplus_with_its_gradient(relu: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    with SmoothRelu():
        y = relu(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
    wanted = functional.softplus(x)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.square().sum(), x)[0])
