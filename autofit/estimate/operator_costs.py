"""What an operator costs: arithmetic, and bytes read and written, by kind of operator."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

MATMUL = "matmul"
ATTENTION = "attention"
_KINDS = {
    **dict.fromkeys(
        (
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "_scaled_mm",
            "_int_mm",
            "_grouped_mm",
            "linear",
        ),
        MATMUL,
    ),
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), MATMUL),
    **dict.fromkeys(("convolution", "convolution_backward", "_convolution"), "convolution"),
}
_FLOPS = {**flop_registry, torch.ops.aten._int_mm: flop_registry[torch.ops.aten.mm]}
# Their first argument is added to the product, and may be wider.
_ADDED_TO = ("::addmm", "::baddbmm")
_FUSED_ATTENTION = "scaled_dot_product"
_RNN = "mkldnn_rnn_layer"
_FREE = (
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "_unsafe_view",
    "_reshape_alias",
)


@dataclass(frozen=True)
class Cost:
    """What one call of an operator costs.

    Attributes:
        kind: matmul, attention, convolution or memory; also host or transfer in a recorder.
        dtype: the number format, as in torch.
        flops: floating-point operations.
        sizes: the bytes of each tensor that it reads or writes.
        name: of the operator, with its namespace.
    """

    kind: str
    dtype: str
    flops: int
    sizes: tuple[int, ...]
    name: str = ""

    @property
    def operator(self) -> str:
        """The operator and its number format."""
        return f"{self.name} {self.dtype}"

    @property
    def call(self) -> str:
        """The operator, its number format and the bytes of its tensors."""
        return f"{self.operator} {'+'.join(map(str, self.sizes))}"

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(self.sizes)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments and results."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(*value)
        elif isinstance(value, dict):
            tensors += tensors_in(*value.values())

    return tensors


@cache
def _kind(func: Any) -> str | None:
    """None for what computes nothing: views, allocations, and what other ranks are sent."""
    namespace, _, name = func._schema.name.partition("::")
    if func.is_view or name in _FREE or "c10d" in namespace:
        return None
    if name in _KINDS:
        return _KINDS[name]
    if _FUSED_ATTENTION in name or "flash_attention" in name or "efficient_attention" in name:
        return ATTENTION

    return "memory"


def cost_of(
    func: Any,
    args: Any,
    kwargs: Any,
    given: list[torch.Tensor],
    result: Any,
) -> Cost | None:
    """The cost of one call, whose tensors are given; None for views."""
    kind = _kind(func)
    if kind is None:
        return None

    tensors = given + tensors_in(result)
    if not tensors:
        return None

    sizes = tuple(tensor.numel() * tensor.itemsize for tensor in tensors)
    name = func._schema.name
    factor = tensors[1] if name.endswith(_ADDED_TO) else tensors[0]

    return Cost(
        kind,
        str(factor.dtype).removeprefix("torch."),
        _flops(func, args, kwargs, result),
        sizes,
        name,
    )


@cache
def _causal_at(func: Any) -> int:
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return at

    return -1


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    at = _causal_at(func)
    if 0 <= at < len(args):
        return bool(args[at])

    return bool(kwargs.get("is_causal"))


def _flops(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
) -> int:
    name = func._schema.name
    # PyTorch 2.11 counts nothing where keys have fewer heads than queries.
    if _FUSED_ATTENTION in name:
        # Products of (batch, heads, length, size), 2 operations each: 2 forward, 5 backward (scores
        # again, then the gradients of probabilities, values, queries and keys), of which 1 and 2
        # run over the size of a value.
        if name.endswith("backward"):
            query, key, value = args[1:4]
            sizes = 3 * query.shape[-1] + 2 * value.shape[-1]
        else:
            query, key, value = args[:3]
            sizes = query.shape[-1] + value.shape[-1]

        products = 2 * query.shape[:-1].numel() * key.shape[-2] * sizes

        # Cards' kernels skip what a causal mask hides; the CPU's are measured, whatever they skip.
        if "cpu" not in name and _is_causal(func, args, kwargs):
            products //= 2
        return int(products)

    # Each step multiplies by both weights, and its backward by their transposes, and twice.
    if _RNN in name:
        products = 2 * args[0].shape[:-1].numel() * (args[1].numel() + args[2].numel())
        if name.endswith("backward"):
            products *= 2
        return int(products)

    # Each row with one expert's weights, or their gradients from each row once.
    if name.endswith("::_grouped_mm"):
        return int(2 * args[0].numel() * args[1].shape[-1])

    count = _FLOPS.get(func._overloadpacket)
    if count is None:
        return 0

    # A format among the arguments is the wider one of a product.
    args = tuple(arg for arg in args if not isinstance(arg, torch.dtype))

    return int(count(*args, **kwargs, out_val=result))
