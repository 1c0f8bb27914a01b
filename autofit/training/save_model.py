"""Saving the trained model as its own library does (an adapter, a transformers model, or safetensors), and merging
adapters into a plain model."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autofit.core.errors import InputError
from autofit.core.hardware import MIB
from autofit.distributed import Ranks
from autofit.setup import Setup
from autofit.setup.adapters import base_of, is_adapter, is_copy
from autofit.setup.experts import adapts_parameter, plain_experts, quantised_weights
from autofit.setup.layers import output_head
from autofit.setup.sharding import whole
from autofit.techniques.quantization import dequantised, is_quantised
from autofit.training import adapter_files, atomic_writes


def save_model(setup: Setup, directory: Path) -> None:
    """Write the trained model so that its own library reads it; other files in the directory stay.

    With adapters, of autofit's making or the user's: `adapter_model.safetensors` and `adapter_config.json`, for
    `PeftModel.from_pretrained(base, directory)`; with several, those that are not in use go into folders of their
    names. A transformers model: for `from_pretrained(directory)`. Any other module: `model.safetensors`, for
    `safetensors.torch.load_model`. Of several ranks, who call this together, the first writes; its host holds the
    trained weights meanwhile.
    """
    is_adapted = adapter_files.is_saved_as_adapters(setup.model)
    files = adapter_files.adapter_files(setup.model) if is_adapted else []
    state: dict[str, Any] = {} if is_adapted else setup.model.state_dict()
    saved = [*state.values(), *(tensor for file in files for tensor in file.tensors.values())]
    needed = (
        sum(each.numel() * each.itemsize for each in saved if isinstance(each, torch.Tensor)) + MIB
    )
    files = [file._replace(tensors=gathered(file.tensors, setup.ranks)) for file in files]
    state = gathered(state, setup.ranks)
    if not setup.ranks.is_first:
        return
    with atomic_writes.atomic_files(
        directory, what="the trained model", needed_bytes=needed
    ) as part:
        if is_adapted:
            adapter_files.write(setup.model, files, setup.workload.task, part)
        elif callable(save_pretrained := getattr(setup.model, "save_pretrained", None)):
            save_pretrained(part, state_dict=state) if setup.ranks.are_several else save_pretrained(
                part
            )
        elif setup.ranks.are_several:
            safetensors.torch.save_file(_each_once(state), part / "model.safetensors")
        else:
            safetensors.torch.save_model(setup.model, str(part / "model.safetensors"))


@torch.no_grad()
def gathered(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Whole tensors: of several ranks, who call this together, in the first one's host memory, one after the other.
    Tied ones stay the same tensor."""
    if not ranks.are_several:
        return dict(tensors)
    found: dict[str, torch.Tensor] = {}
    names: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in tensors.items():
        address = tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()
        first = names.setdefault((address, tensor.shape), name) if address else name
        if first != name:
            found |= {name: found[first]} if ranks.is_first else {}
            continue
        full = whole(tensor.detach())
        if ranks.is_first:
            found[name] = full.cpu()
    return found


def _each_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without further names of the same tensor, which safetensors does not take."""
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensors[name].contiguous() for name in names.values()}


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """A plain copy of a model, of the same class, with its adapters added to the weights, whoever made them; of a
    PeftModel a copy of the model inside. The model stays as it is. Takes room on the device for a second, unquantised
    copy of the weights. Quantised layers become plain ones with the values they compute with: quantising the sum again,
    as peft does, would round most of an update away (a step of nf4 is 4 to 15 % of a block's range). Outputs equal
    those with adapters up to the rounding of the weights' dtype; int8 layers also round activations. A head that was
    tied to the embeddings, of which one has an adapter, is no longer tied.

    Raises:
        InputError: adapters of a kind that cannot be added to weights, such as learned prompts.
    """
    _check_mergeable(model)
    plain = base_of(copy.deepcopy(model))
    _untie_adapted(plain)

    # The compute dtype is that of the embeddings, norms and heads beside quantised layers.
    frozen = (
        p.dtype
        for p in plain.parameters()
        if not p.requires_grad and p.is_floating_point() and p.itemsize > 1
    )
    dtype = next(frozen, None)
    for parent, name, child in list(_replaced_layers(plain)):
        setattr(parent, name, _merged_layer(child, dtype or torch.get_default_dtype()))
    for parameter in plain.parameters() if dtype else ():
        if parameter.requires_grad and parameter.is_floating_point():
            # a head that was trained in fp32 beside weights in bf16
            parameter.data = parameter.data.to(dtype)

    # by which transformers would save adapters alone
    for note in ("peft_config", "_hf_peft_config_loaded"):
        plain.__dict__.pop(note, None)
    _note_untied(plain)
    return plain


def _check_mergeable(model: Any) -> None:
    """Raise an InputError for what peft learns beside layers, and for what replaces more than a layer."""
    remedy = "Use the model as it is: output_dir/model holds what PeftModel.from_pretrained reads."
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise InputError(
            f"{config.peft_type.value} learns prompts, which are no part of any weight.", remedy
        )
    if getattr(config, "is_adaption_prompt", False):
        raise InputError(
            f"{config.peft_type.value} learns more than can be added to weights.", remedy
        )


def _replaced_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(parent, name, layer) of every layer with adapters, trained copies or quantised weights."""
    for name, child in model.named_children():
        if (
            is_adapter(child)
            or is_copy(child)
            or is_quantised(child)
            or any(quantised_weights(child))
        ):
            yield model, name, child
        else:
            yield from _replaced_layers(child)


def _merged_layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    if is_copy(layer):
        if layer.disable_adapters:
            return layer.original_module  # type: ignore[no-any-return]
        return layer.unload_and_optionally_merge_module(  # type: ignore[no-any-return]
            merge=True, safe_merge=False, adapter_names=None
        )
    if any(quantised_weights(layer)) or adapts_parameter(layer):
        return plain_experts(layer, dtype)
    if is_quantised(layer):
        return dequantised(layer, dtype)

    base = layer.get_base_layer()
    if layer.disable_adapters:
        if layer.merged:
            layer.unmerge()
        return dequantised(base, dtype) if is_quantised(base) else base
    if is_quantised(base):
        delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
        return dequantised(base, dtype, delta)
    layer.merge()
    return base  # type: ignore[no-any-return]


def _untie_adapted(model: nn.Module) -> None:
    """Give every adapted layer its own weight, so that its adapter is not added to layers that share it. Rows of tokens
    that are trained (`trainable_token_indices`) are set, not added, in all layers that share them."""
    uses = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    for module in filter(is_adapter, model.modules()):
        if adapts_parameter(module) or hasattr(module, "trainable_tokens_delta"):
            continue
        base: Any = module.get_base_layer()  # type: ignore[operator]
        if isinstance(getattr(base, "weight", None), nn.Parameter) and uses[id(base.weight)] > 1:
            base.weight = nn.Parameter(base.weight.detach().clone(), base.weight.requires_grad)


def _note_untied(model: Any) -> None:
    """Let a transformers model know that its head is tied to the embeddings no more: it would tie the two again."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not config.get_text_config().tie_word_embeddings:
        return
    head = output_head(model)
    embedding = model.get_input_embeddings()
    if head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
