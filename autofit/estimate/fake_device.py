"""The fake device that a config is traced on: tensors without storage, and operators that behave as
on the target.

Tensors are fake CPU tensors whatever the target, because a build of PyTorch without CUDA cannot
differentiate fake CUDA tensors (the process ends). What CUDA does differently is patched in: the
choice of the attention kernel, dropout masks, and the operators that CUDA's autocast computes in
fp32.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from autofit.core.hardware import Hardware
from autofit.estimate.cuda_kernels import cuda_attention
from autofit.estimate.known_values import value_of
from autofit.estimate.packed_sequences import packed_operators
from autofit.estimate.quick_fakes import QuickFakes

_MATCHING = "linear_sum_assignment"
_FP32_IN_CUDA_AUTOCAST = (
    "softmax",
    "layer_norm",
    "log_softmax",
    "cross_entropy",
    "nll_loss",
    "group_norm",
    "mse_loss",
)


@contextmanager
def fake_device(hardware: Hardware) -> Iterator[FakeTensorMode]:
    """Inside, new tensors are fake, and real ones that meet them are treated as fakes of their
    shape."""
    with ExitStack() as stack:

        def patch(target: Any, name: str, replacement: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, replacement))

        patch(torch, "tensor", _of_numbers(torch.tensor))
        for module in _matching_modules(len(sys.modules)):
            patch(module, _MATCHING, _matching_in_order(getattr(module, _MATCHING)))

        patch(FakeTensor, "__format__", _formatted)
        patch(torch.utils, "swap_tensors", _of_unlike(torch.utils.swap_tensors))
        for name, operator in packed_operators():
            patch(torch._VF, name, operator)

        masks: Any = sys.modules.get("transformers.masking_utils")
        if masks is not None:
            # transformers mistakes fake tensors for an export, and would make masks that a run does
            # not have.
            patch(masks, "is_tracing", lambda *_, **__: False)

        caches: Any = sys.modules.get("transformers.pytorch_utils")
        if caches is not None:
            name = "is_torchdynamo_compiling"
            patch(caches, name, _emptying_caches(getattr(caches, name), stack))

        if hardware.device == "cuda":
            # Fake tensors would take an LSTM for oneDNN's, whose workspace they lack. Step by step
            # it keeps more. PyTorch's own context for this warns.
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)

            attention = cuda_attention(hardware, functional.scaled_dot_product_attention)
            patch(functional, "scaled_dot_product_attention", attention)
            patch(functional, "dropout", _cuda_dropout(functional.dropout))
            for name in ("is_autocast_enabled", "get_autocast_dtype"):
                patch(torch, name, _of_cpu_autocast(getattr(torch, name)))

            for name in _FP32_IN_CUDA_AUTOCAST:
                patch(functional, name, _in_fp32(getattr(functional, name)))

        yield stack.enter_context(QuickFakes(allow_non_fake_inputs=True))


def _of_cpu_autocast(query: Callable[[str], Any]) -> Callable[..., Any]:
    """Answers questions about CUDA's autocast with the CPU's; peft asks, to cast its inputs or
    not."""

    def asked(device: str = "cuda") -> Any:
        if device == "cuda":
            device = "cpu"
        return query(device)

    return asked


def _of_numbers(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Lists of tensors of one number, whose memory PyTorch would read, become lists of numbers."""

    def numbers(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return [numbers(item) for item in data]
        if isinstance(data, FakeTensor) and data.dim() == 0:
            return data.item()

        return data

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        return plain(numbers(data), **options)

    return tensor


def _emptying_caches(plain: Callable[[], bool], stack: ExitStack) -> Callable[[], bool]:
    """What transformers caches for the process (DETR's positions) is made anew, and must not stay,
    being fake: its caches ask this before they answer."""
    met = set()

    def compiling() -> bool:
        cache = sys._getframe(1).f_locals.get("func_with_cache")
        if cache is not None and cache not in met:
            met.add(cache)
            cache.cache_clear()
            stack.callback(cache.cache_clear)

        return plain()

    return compiling


def _formatted(tensor: FakeTensor, form: str) -> str:
    """A number of known value, by which experts are named (Switch Transformers)."""
    if tensor.dim() or value_of(tensor) is None:
        return object.__format__(tensor, form)
    return format(tensor.item(), form)


@functools.lru_cache(1)
def _matching_modules(_: int) -> list[ModuleType]:
    """Those that have scipy's matching of costs; looked for again when there are more modules,
    since there are thousands."""
    scipy = sys.modules.get("scipy.optimize")
    matching = getattr(scipy, _MATCHING, None)
    if matching is None:
        return []

    modules = list(sys.modules.values())

    return [module for module in modules if vars(module).get(_MATCHING) is matching]


def _matching_in_order(plain: Any) -> Callable[..., Any]:
    """A matching of queries and objects, which detection trains by: its size does not depend on the
    costs."""

    def matching(costs: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(costs, FakeTensor):
            return plain(costs, *args, **options)

        matched = np.arange(min(costs.shape))
        return matched, matched

    return matching


def _of_unlike(plain: Callable[..., None]) -> Callable[..., None]:
    """`Module.to` exchanges each fake parameter, which cannot be where others know it: alike ones
    are left alone."""

    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            plain(one, other)

    return swap


def _cuda_dropout(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """CUDA saves one byte per element, a CPU a factor in the input's format (Dropout.cpp,
    dropout)."""

    def dropout(
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if training and not inplace and 0 < p < 1 and input.numel() > 0:
            return torch.native_dropout(input, p, True)[0]
        return plain(input, p, training, inplace)

    return dropout


def _in_fp32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What only CUDA's autocast computes in fp32 (torch/amp: "CUDA Ops that can autocast to
    float32")."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.float()
        return value

    def widened(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.is_autocast_enabled("cpu") or not input.is_floating_point():
            return function(input, *args, **kwargs)

        wide = [widen(value) for value in args]
        named = {name: widen(value) for name, value in kwargs.items()}

        return function(input.float(), *wide, **named)

    return widened
