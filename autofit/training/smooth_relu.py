"""ReLU without its kink, for comparisons of gradients.

A unit whose input is close to zero can be on in one pass and off in another by rounding alone. Its
gradient then differs, which looks like a loss that couples samples. A smooth function in its place
leaves only rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import softplus
from torch.utils._python_dispatch import TorchDispatchMode

_RELU = torch.ops.aten.relu.default
_RELU_IN_PLACE = torch.ops.aten.relu_.default
_BACKWARD = torch.ops.aten.threshold_backward.default


class SmoothRelu(TorchDispatchMode):
    """Makes every ReLU a softplus, forwards and backwards."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _RELU:
            return softplus(args[0])

        if func is _RELU_IN_PLACE:
            return args[0].copy_(softplus(args[0]))

        if func is _BACKWARD:
            # softplus(x) = y has the derivative 1 - exp(-y)
            gradient, output, _ = args
            return gradient * -torch.expm1(-output)

        return func(*args, **(kwargs or {}))
