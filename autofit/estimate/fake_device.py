"""The fake device a config is traced on: tensors without storage, and operators that behave as on the target.

Tensors are fake CPU tensors whatever the target, because a build of PyTorch without CUDA cannot differentiate fake CUDA
tensors (the process ends). What CUDA does differently is patched in: the choice of the attention kernel, dropout masks,
and the operators that CUDA's autocast computes in fp32.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch

from autofit.core.hardware import Hardware
from autofit.estimate.known_values import value_of
from autofit.estimate.packed_sequences import packed_operators

_AMPERE = (8, 0)
_HOPPER = (9, 0)
_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024  # bytes: ":4096:2:16:8", parseChosenWorkspaceSize
_HOPPER_WORKSPACE = 8 * 4096 * 1024
_FLASH_HEAD = (
    256  # largest head size of PyTorch's flash kernel: sdp_utils.cpp, check_head_dim_size_flash
)
_CUDNN_FIRST = (9, 10)  # major capabilities on which PyTorch prefers cuDNN's kernel
# largest head size, and the one pair (of keys, of values) beyond it
_CUDNN_HEAD, _CUDNN_HEADS = (128, (192, 128))
# check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0))
_MATCHING = "linear_sum_assignment"
_EFFICIENT_ALIGNMENT = 16  # bytes of a row that the efficient kernel reads at once
# How code names its parts for a profiler; FSDP does so at each step of its own.
_RANGES = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
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
    """Inside, new tensors are fake, and real ones that meet them are treated as fakes of their shape."""
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
            # transformers mistakes fake tensors for an export, and would make masks that a run does not have.
            patch(masks, "is_tracing", lambda *_, **__: False)
        caches: Any = sys.modules.get("transformers.pytorch_utils")
        if caches is not None:
            patch(
                caches,
                "is_torchdynamo_compiling",
                _emptying_caches(caches.is_torchdynamo_compiling, stack),
            )
        if hardware.device == "cuda":
            # Fake tensors would take an LSTM for oneDNN's, whose workspace they lack. Step by step it keeps more.
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)  # PyTorch's own context warns
            attention = _cuda_attention(hardware, functional.scaled_dot_product_attention)
            patch(functional, "scaled_dot_product_attention", attention)
            patch(functional, "dropout", _cuda_dropout(functional.dropout))
            for name in ("is_autocast_enabled", "get_autocast_dtype"):
                patch(torch, name, _of_cpu_autocast(getattr(torch, name)))
            for name in _FP32_IN_CUDA_AUTOCAST:
                patch(functional, name, _in_fp32(getattr(functional, name)))
        yield stack.enter_context(_QuickFakes(allow_non_fake_inputs=True))


class _QuickFakes(FakeTensorMode):
    """The mode with shorter keys of what it remembers of operators, and results made from that
    without the mode's checks. Both took half of a trace."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # By device the one that a new fake tensor is said to be on, and all that it holds beside
        # its shape.
        self._fresh: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The mode remembers neither, and runs all of its checks each time.
        if func is torch.ops.aten._unsafe_view.default:
            func = torch.ops.aten.view.default
        elif func in _RANGES:
            with no_dispatch():
                return func(*args, **(kwargs or {}))
        return self.dispatch(func, types, args, kwargs or {})

    def _get_output_tensor_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Any
    ) -> FakeTensor | None:
        made = entry.metadata
        fresh = self._fresh.get(made.device) if made is not None else None
        if (
            fresh is None
            or entry.inplace_idx is not None
            or made.layout is not torch.strided
            or made.is_conj
            or made.is_neg
        ):
            fake = super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
            if made is not None and entry.inplace_idx is None and fake is not None:
                self._fresh.setdefault(made.device, (fake.fake_device, dict(fake.__dict__)))
            return fake

        device, attributes = fresh
        with no_dispatch():
            if isinstance(func, OpOverload) and func.is_view:
                storage = args[entry.view_idx].untyped_storage()
                meta = torch.empty(0, dtype=made.dtype, device="meta")
                meta.set_(storage, made.storage_offset, made.shape, made.stride)
            else:
                meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")

        fake = torch.Tensor._make_subclass(
            FakeTensor,
            meta,
            made.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)
        return fake

    def _prep_args_for_hash(
        self, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]
    ) -> None:
        key: list[Any] = [_QuickFakes]
        for arg in (*args.keys(), *args.values()) if isinstance(args, dict) else args:
            if (
                type(arg) is FakeTensor
                and arg.layout is torch.strided
                and arg.constant is None
                and arg.fake_mode is self
            ):
                size = arg.untyped_storage().nbytes()
                place = arg.storage_offset(), size, arg.fake_device, arg.requires_grad
                key += (
                    arg.dtype,
                    arg.shape,
                    arg.stride(),
                    place,
                    arg.is_inference(),
                    arg.is_conj(),
                    arg.is_neg(),
                )
            elif type(arg) in _PLAIN:
                key += type(arg), arg
            elif type(arg) in (list, tuple):
                self._prep_args_for_hash(key, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, args, state, id_hashed_objects)
                return
        result.append(tuple(key))


def kernels_of(hardware: Hardware) -> tuple[bool, ...]:
    """What of a card its traces depend on; cards of which it is the same share them.

    It is which kernels of attention PyTorch takes there, and how much cuBLAS holds.
    """
    return (
        _of_ampere(hardware),
        _of_hopper(hardware),
        _prefers_cudnn(hardware),
        hardware.capability in _LITTLE_SHARED_MEMORY,
    )


def _of_ampere(hardware: Hardware) -> bool:
    """Whether it is of this generation or a later one, as a card that is not known is."""
    return hardware.capability is None or hardware.capability >= _AMPERE


def _of_hopper(hardware: Hardware) -> bool:
    return hardware.capability is not None and hardware.capability >= _HOPPER


def _prefers_cudnn(hardware: Hardware) -> bool:
    return hardware.capability is not None and hardware.capability[0] in _CUDNN_FIRST


def workspace_bytes(hardware: Hardware) -> int:
    """What cuBLAS holds in PyTorch's allocator from the first backward on (CUDABlas' CublasHandlePool.cpp). Handles are
    per thread, and each has a workspace: one for the forward, one for the thread of the backward."""
    if hardware.device != "cuda":
        return 0
    each = _HOPPER_WORKSPACE if _of_hopper(hardware) else _WORKSPACE
    return 2 * each


def _of_cpu_autocast(query: Callable[[str], Any]) -> Callable[..., Any]:
    """Answers questions about CUDA's autocast (peft asks, to cast its inputs or not) with the CPU's."""
    return lambda device="cuda": query("cpu" if device == "cuda" else device)


def _of_numbers(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Lists of tensors of one number, whose memory PyTorch would read, become lists of numbers."""

    def numbers(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return [numbers(each) for each in data]
        return data.item() if isinstance(data, FakeTensor) and not data.dim() else data

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        return plain(numbers(data), **options)

    return tensor


def _emptying_caches(plain: Callable[[], bool], stack: ExitStack) -> Callable[[], bool]:
    """What transformers caches for the process (DETR's positions) is made anew, and must not stay, being fake: its
    caches ask this before they answer."""
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
    known = None if tensor.dim() else value_of(tensor)
    return object.__format__(tensor, form) if known is None else format(tensor.item(), form)


@functools.lru_cache(1)
def _matching_modules(_: int) -> list[ModuleType]:
    """Those that have scipy's matching of costs; looked for again when there are more modules, since there are
    thousands."""
    matching = vars(sys.modules.get("scipy.optimize", sys)).get(_MATCHING)
    return [
        module
        for module in list(sys.modules.values())
        if matching and vars(module).get(_MATCHING) is matching
    ]


def _matching_in_order(plain: Any) -> Callable[..., Any]:
    """A matching of queries and objects, which detection trains by: its size does not depend on the costs."""

    def matching(costs: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(costs, FakeTensor):
            return plain(costs, *args, **options)
        return (np.arange(min(costs.shape)),) * 2

    return matching


def _of_unlike(plain: Callable[..., None]) -> Callable[..., None]:
    """`Module.to` exchanges each fake parameter, which cannot be where others know it: alike ones are left alone."""

    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            plain(one, other)

    return swap


def _cuda_dropout(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """CUDA saves one byte per element, a CPU a factor in the input's format (Dropout.cpp, dropout)."""

    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        fused = training and not inplace and 0 < p < 1 and input.numel() > 0
        return (
            torch.native_dropout(input, p, True)[0] if fused else plain(input, p, training, inplace)
        )

    return dropout


def _in_fp32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What only CUDA's autocast computes in fp32 (torch/amp: "CUDA Ops that can autocast to float32")."""

    def widen(value: Any) -> Any:
        return (
            value.float()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
        )

    def widened(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and input.is_floating_point():
            input, *args = map(widen, (input, *args))  # type: ignore[assignment]
            kwargs = {name: widen(value) for name, value in kwargs.items()}
        return function(input, *args, **kwargs)

    return widened


class _Attention(NamedTuple):
    """The arguments of one call; `grouped`: several heads of queries share one of keys."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    grouped: bool

    @property
    def regular(self) -> bool:
        """What all fused kernels need: batch, heads, length and size, the last contiguous, and none of them 0."""
        tensors = self.query, self.key, self.value
        return all(
            tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.numel() > 0
            for tensor in tensors
        )

    @property
    def half(self) -> bool:
        return self.query.dtype in (torch.float16, torch.bfloat16)

    def bias(self) -> torch.Tensor | None:
        """What is added to the scores: 0, and minus infinity where a mask says so."""
        mask, query = self.mask, self.query
        if mask is None:
            return None
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
                mask.logical_not(), float("-inf")
            )
        return mask.expand(query.shape[0], query.shape[1], query.shape[2], self.key.shape[2])


def _cuda_attention(
    hardware: Hardware, plain: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """PyTorch's fused attention, by the kernel that it chooses on that card (sdp_utils.cpp)."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.is_autocast_enabled("cpu"):  # autocast casts before the choice is made
            low = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(low), key.to(low), value.to(low)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        call = _Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, grouped)
        for takes, compute in _KERNELS:
            if takes(call, hardware):
                return compute(call)
        if not torch.backends.cuda.math_sdp_enabled():
            # word for word PyTorch's
            raise RuntimeError("No available kernel. Aborting execution.")
        math: Any = torch.ops.aten._scaled_dot_product_attention_math.default
        return math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]

    return attention


def _takes_cudnn(call: _Attention, hardware: Hardware) -> bool:
    """can_use_cudnn_attention, with masks and groups too; check_prefer_cudnn_attention says where it comes first."""
    preferred = _prefers_cudnn(hardware)
    sizes = call.query.shape[-1], call.value.shape[-1]
    supported = not any(size % 8 for size in sizes) and (
        max(sizes) <= _CUDNN_HEAD or sizes == _CUDNN_HEADS
    )
    long = call.key.shape[-2] > 1 and (call.query.shape[-2] > 1 or not call.dropout)
    allowed = (
        torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    )
    return allowed and preferred and call.half and supported and long and call.regular


def _takes_flash(call: _Attention, hardware: Hardware) -> bool:
    """can_use_flash_attention: half precision on Ampere and later, one head size up to 256, no mask."""
    size = call.query.shape[-1]
    ampere = _of_ampere(hardware)
    one_size = size == call.key.shape[-1] == call.value.shape[-1] and size <= _FLASH_HEAD
    square = not call.is_causal or call.query.shape[-2] == call.key.shape[-2]
    small_card = hardware.capability in _LITTLE_SHARED_MEMORY and torch.is_grad_enabled()
    too_large = small_card and (192 < size <= 224 or (size > 224 and call.dropout > 0))
    allowed = torch.backends.cuda.flash_sdp_enabled() and call.mask is None and not too_large
    return allowed and ampere and call.half and one_size and square and call.regular


def _takes_efficient(call: _Attention, hardware: Hardware) -> bool:
    """can_use_mem_efficient_attention: rows that are whole 16 bytes (minimum_gemm_alignment), no groups."""
    query, value = call.query, call.value
    ampere = _of_ampere(hardware)
    fp16 = query.dtype is torch.float16
    supported = fp16 or query.dtype is torch.float32 or (ampere and query.dtype is torch.bfloat16)
    elements = _EFFICIENT_ALIGNMENT // query.itemsize if ampere or fp16 else 1
    aligned = query.shape[-1] % elements == 0 and value.shape[-1] % elements == 0
    allowed = (
        torch.backends.cuda.mem_efficient_sdp_enabled() and query.shape[-1] == call.key.shape[-1]
    )
    return allowed and supported and aligned and not call.grouped and call.regular


def _by_cudnn(call: _Attention) -> Any:
    """What it saves for the backward; its workspace, known to cuDNN alone and on a card only, is left out."""
    cudnn: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    query, key, value, _, dropout, is_causal, scale, _ = call
    return cudnn(
        query,
        key,
        value,
        call.bias(),
        torch.is_grad_enabled(),
        dropout,
        is_causal,
        False,
        scale=scale,
    )[0]


def _by_flash(call: _Attention) -> Any:
    query, key, value, _, dropout, is_causal, scale, _ = call
    size = query.shape[-1]
    padding = -size % 8  # the kernel takes head sizes in steps of 8: sdp_utils, pad_last_dim
    if padding:
        query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
        scale = scale or size**-0.5
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    out = flash(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return out[..., :size] if padding else out


def _by_efficient(call: _Attention) -> Any:
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    query, key, value, _, dropout, is_causal, scale, _ = call
    return efficient(
        query, key, value, call.bias(), torch.is_grad_enabled(), dropout, is_causal, scale=scale
    )[0]


# the first one
_KERNELS = ((_takes_cudnn, _by_cudnn), (_takes_flash, _by_flash), (_takes_efficient, _by_efficient))
