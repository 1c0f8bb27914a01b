"""What CUDA does otherwise than a CPU, on fake tensors: the attention kernel, dropout's mask, cuBLAS's workspace."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.hardware import GIB, Hardware
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.fake_device import fake_device

A100 = Hardware("cuda", "A100", 40 * GIB, GIB, GIB, 8, (8, 0))
A10G = replace(A100, capability=(8, 6))
T4 = replace(A100, capability=(7, 5))
H100 = replace(A100, capability=(9, 0))
CPU = replace(A100, device="cpu", capability=None)
KERNELS = ("cudnn", "flash", "efficient", "math")


class Called(TorchDispatchMode):
    """Which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def kernel(
    hardware: Hardware, *, dtype: torch.dtype = torch.bfloat16, size: int = 64, **given: Any
) -> str:
    lengths, heads = given.pop("lengths", (16, 16)), given.pop("heads", (4, 4))
    with fake_device(hardware), Called() as called:
        query = torch.empty(2, heads[0], lengths[0], size, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(2, heads[1], lengths[1], size, dtype=dtype) for _ in range(2))
        if given.pop("gaps", False):
            key = torch.empty(2, heads[1], lengths[1], 2 * size, dtype=dtype)[..., ::2]
        if given.pop("masked", False):
            given["attn_mask"] = torch.ones(lengths, dtype=torch.bool)
        out = functional.scaled_dot_product_attention(query, key, value, **given)
    assert out.shape == (2, heads[0], lengths[0], size)
    return next(
        (name for name in KERNELS if any(f"product_{name}" in each for each in called.names)),
        "math",
    )


@pytest.mark.parametrize(
    ("hardware", "given", "expected"),
    [
        (A100, {}, "flash"),
        (A100, {"dtype": torch.float16, "size": 80}, "flash"),
        (A100, {"dtype": torch.float32}, "efficient"),
        (A100, {"masked": True}, "efficient"),
        (A100, {"is_causal": True, "lengths": (8, 16)}, "efficient"),
        (A100, {"size": 320}, "efficient"),
        (A100, {"size": 20, "masked": True}, "math"),  # 40 bytes are no whole 16
        (A100, {"gaps": True}, "math"),
        (A100, {"heads": (4, 2), "enable_gqa": True}, "flash"),
        (A100, {"heads": (4, 2), "enable_gqa": True, "dtype": torch.float32}, "math"),
        (A100, {"size": 256}, "flash"),
        (A10G, {"size": 256}, "flash"),
        (A10G, {"size": 256, "dropout_p": 0.1}, "efficient"),
        (A10G, {"size": 200}, "efficient"),
        (T4, {"dtype": torch.float16}, "efficient"),
        (T4, {}, "math"),
        (H100, {}, "cudnn"),
        (H100, {"masked": True, "heads": (4, 2), "enable_gqa": True}, "cudnn"),
        (H100, {"size": 192}, "flash"),
        (H100, {"size": 20}, "flash"),
        (H100, {"dtype": torch.float32}, "efficient"),
        (H100, {"lengths": (16, 1)}, "flash"),
        (replace(H100, capability=(12, 0)), {}, "flash"),
    ],
)
def test_attention_takes_the_kernel_that_pytorch_would_choose(
    hardware: Hardware, given: dict[str, Any], expected: str
) -> None:
    assert kernel(hardware, **given) == expected


def test_dropout_keeps_a_byte_for_each_element_on_cuda_and_a_factor_on_a_cpu() -> None:
    def kept(hardware: Hardware) -> set[torch.dtype]:
        saved = []
        with (
            fake_device(hardware),
            torch.autograd.graph.saved_tensors_hooks(
                lambda each: saved.append(each.dtype), lambda each: each
            ),
        ):
            functional.dropout(torch.empty(8, 8, dtype=torch.bfloat16, requires_grad=True), 0.1)
        return set(saved)

    assert kept(A100) == {torch.bool}
    assert kept(CPU) == {torch.bfloat16}


def test_dropout_that_does_nothing_keeps_nothing() -> None:
    with fake_device(A100), Called() as called:
        functional.dropout(torch.empty(8, 8), 0.1, training=False)
        functional.dropout(torch.empty(8, 8), 0.0)
    assert not any("native_dropout" in name for name in called.names)


def test_cublas_has_a_workspace_for_the_forward_and_one_for_the_backward() -> None:
    assert workspace_bytes(A100) == 2 * 8_519_680
    assert workspace_bytes(H100) == 2 * 32 * 2**20
    assert workspace_bytes(CPU) == 0


def test_whoever_asks_about_cudas_autocast_is_told_of_the_one_that_is_traced() -> None:
    """peft casts what quantised layers get to the adapters' format, unless autocast does."""
    with fake_device(H100), torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
    with fake_device(H100):
        assert not torch.is_autocast_enabled()
    with fake_device(CPU), torch.autocast("cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled()
