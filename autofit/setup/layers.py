"""What several techniques must agree on: which layers are linear, which make a model's outputs, and
which repeat."""

import contextlib
import inspect
import re
import traceback
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import _disable_current_modes

from autofit.core.tasks import task_of
from autofit.setup.model_part import Elsewhere

_READ = re.compile(r"self\.(\w+)\.weight\b")
# Methods that run before weights are quantised; the last one is diffusers', for inference.
_MAKING = ("__init__", "_init_weights", "init_weights", "reset_parameters", "fuse_projections")
_reads: dict[type, set[str]] = {}  # by class
_multiply: dict[type, bool] = {}  # by class of a forward of its own
_REPLACE = re.compile(r"[/\\](bitsandbytes|peft|torch)[/\\]")
_LIBRARIES = ("bitsandbytes.", "torchao.")  # whose layers take the place of plain ones


def is_linear(module: nn.Module) -> bool:
    """A plain linear layer, or a quantised one."""
    if is_plain_linear(module):
        return True
    return isinstance(module, nn.Linear) and type(module).__module__.startswith(_LIBRARIES)


def is_quantized(module: nn.Module) -> bool:
    """A linear layer of a library that quantises, whose weight is not trained."""
    is_theirs = type(module).__module__.startswith(_LIBRARIES)
    return isinstance(module, nn.Linear) and is_theirs and not module.weight.requires_grad


def is_plain_linear(module: nn.Module) -> bool:
    """A linear layer that is called, including GPT-2's transposed ones.

    Not the last layer of an nn.MultiheadAttention, whose weight is read without a call, so a
    replacement has no effect; not a subclass whose forward computes something else, such as a
    router of experts, which returns more than a tensor.
    """
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if isinstance(module, nn.Linear) and _multiplies(module):
        return True
    return is_transposed_linear(module)


def _multiplies(layer: nn.Linear) -> bool:
    """Whether a layer's forward is that of nn.Linear, or gives the same of a small weight."""
    kind = type(layer)
    if kind.__module__.startswith(_LIBRARIES):
        return False
    if kind.forward is not nn.Linear.forward and kind not in _multiply:
        _multiply[kind] = _gives_the_same(layer)
    return _multiply.get(kind, True)


def _gives_the_same(layer: nn.Linear) -> bool:
    """Whether a layer multiplies as nn.Linear does, with a weight of two rows and three columns."""
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        # of both signs, which chance alone does not warrant
        generator = torch.Generator().manual_seed(0)
        tensors = {"weight": torch.randn(2, 3, generator=generator, device="cpu")}
        if layer.bias is not None:
            tensors["bias"] = torch.randn(2, generator=generator, device="cpu")
        inputs = torch.randn(4, 3, generator=generator, device="cpu")

        # whatever code raises that was written for its own weight
        with contextlib.suppress(Exception):
            made = functional_call(layer, tensors, (inputs,))
            return torch.allclose(made, functional.linear(inputs, **tensors), atol=1e-4)
    return False


def is_transposed_linear(module: nn.Module) -> bool:
    """transformers' Conv1D: weight [in, out] instead of [out, in].

    By name, to leave transformers unimported.
    """
    return type(module).__name__ == "Conv1D"


def is_frozen(layer: nn.Module) -> bool:
    """Whether the user froze a linear layer; once quantised it is frozen anyway."""
    frozen = getattr(layer, "was_frozen", None)
    if frozen is None:
        return not layer.weight.requires_grad
    return bool(frozen)


def weights_read_by(module: nn.Module) -> Set[str]:
    """The layers of a module whose weights its code reads instead of calling them only: T5 asks for
    the format of its `wo`, Mamba multiplies by the weight of `dt_proj`, Gemma 3n clamps that of
    `prediction_coefs`."""
    kind = type(module)
    if kind in _reads:
        return _reads[kind]

    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        own = {name: value for name, value in vars(base).items() if inspect.isfunction(value)}
        methods.update(own)  # instead of inherited ones

    read = set()
    for name, method in methods.items():
        if name in _MAKING:
            continue
        with contextlib.suppress(OSError, TypeError):  # code that no file holds
            read.update(_READ.findall(inspect.getsource(method)))
    _reads[kind] = read
    return read


def tensors_met(error: BaseException) -> list[torch.Tensor]:
    """The tensors in local variables of the code that an error went through, without that of
    libraries which replace layers."""
    tensors: list[torch.Tensor] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if _REPLACE.search(frame.f_code.co_filename):
            continue
        values = frame.f_locals.values()
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return tensors


def children_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of all modules inside a model: a list, so that the caller may replace
    them."""
    return [(parent, *child) for parent in model.modules() for child in parent.named_children()]


def output_head(model: nn.Module) -> nn.Module | None:
    """The output layer that a transformers model names; None for other modules."""
    for name in ("score", "classifier"):  # sequence and image classification
        if hasattr(model, "config") and isinstance(getattr(model, name, None), nn.Linear):
            return getattr(model, name)  # type: ignore[no-any-return]

    get_head: Any = getattr(model, "get_output_embeddings", None)
    if not get_head:
        return None
    return get_head()  # type: ignore[no-any-return]


def output_heads(model: nn.Module) -> list[nn.Module]:
    """The linear layers outside the pretrained body, which adapters and quantisation leave alone.

    In a transformers classifier, all layers outside its base model (RoBERTa's and DistilBERT's
    heads have two): they are new, and random. In any other model, the output layer.
    """
    body = getattr(model, getattr(model, "base_model_prefix", "") or "none", None)
    if task_of(model).classifies and isinstance(body, nn.Module):
        pretrained = set(body.modules())
        linear = [module for module in model.modules() if is_linear(module)]
        return [module for module in linear if module not in pretrained]

    head = output_head(model)
    if head is None:
        return []
    return [head]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks in order: the children of every ModuleList or Sequential that repeats a
    class of layers.

    A list counts when at least two children share a class and at least one child has children of
    its own (a Sequential of bare Linears is no list of blocks). Encoder-decoder models have several
    lists; a block never contains another. Where a model of diffusers names the classes that it
    repeats, what holds such is no block, but they are: a UNet has few stages of many layers.
    """
    named: Set[str] = set(getattr(model, "_repeated_blocks", None) or ())
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # outer modules come before inner ones
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue

        children = [child for child in module if _has_any(child.parameters())]
        kinds = [type(child) for child in children]
        repeats = any(kinds.count(kind) >= 2 for kind in kinds)
        if named:
            if any(kind.__name__ in named for kind in kinds):
                repeats = True
            elif any(type(part).__name__ in named for part in module.modules()):
                continue
        has_parts = any(_has_any(child.children()) for child in children)
        is_stage = any(isinstance(child, Elsewhere) for child in module)  # perhaps of one block

        if (repeats and has_parts) or is_stage:
            # a block with shared weights appears several times
            for child in dict.fromkeys(children):
                blocks.append(child)
                inside.update(child.modules())
    return blocks


def _has_any(items: Iterator[Any]) -> bool:
    return next(items, None) is not None
