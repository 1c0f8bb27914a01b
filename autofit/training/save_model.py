"""Saving the trained model as its own library does, and merging adapters into a plain model."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.core.hardware import MIB
from autofit.setup import Setup
from autofit.setup.adapters import base_of, is_adapter, is_copy
from autofit.setup.experts import adapts_parameter, plain_experts, quantised_weights
from autofit.setup.layers import output_head
from autofit.setup.quantised_layers import dequantised, is_quantised
from autofit.training import adapter_files, atomic_writes
from autofit.training.host_tensors import each_once, gathered


def save_model(setup: Setup, directory: Path) -> None:
    """Write the trained model so that its own library reads it; other files in the directory stay.

    With adapters, of autofit's making or the user's: `adapter_model.safetensors` and
    `adapter_config.json`, for `PeftModel.from_pretrained(base, directory)`; with several, those
    that are not in use go into folders of their names. A transformers model: for
    `from_pretrained(directory)`. Any other module: `model.safetensors`, for
    `safetensors.torch.load_model`. Of several ranks, who call this together, the first writes; its
    host holds the trained weights meanwhile.
    """
    model = setup.model
    ranks = setup.ranks
    files, state = tensors_to_save(setup)
    if not ranks.is_first:
        return

    needed_bytes = MIB
    for tensors in (state, *(file.tensors for file in files)):
        for tensor in tensors.values():
            if isinstance(tensor, torch.Tensor):
                needed_bytes += tensor.numel() * tensor.itemsize

    save_pretrained = getattr(model, "save_pretrained", None)
    with atomic_writes.atomic_files(
        directory, what="the trained model", needed_bytes=needed_bytes
    ) as part:
        path = part / "model.safetensors"
        if files:
            adapter_files.write(model, files, setup.workload.task, part)
        elif callable(save_pretrained) and ranks.are_several:
            save_pretrained(part, state_dict=state)
        elif callable(save_pretrained):
            save_pretrained(part)
        elif ranks.are_several:
            safetensors.torch.save_file(each_once(state), path)
        else:
            safetensors.torch.save_model(model, str(path))


def tensors_to_save(setup: Setup) -> tuple[list[adapter_files.AdapterFile], dict[str, Any]]:
    """What is saved of each adapter, else the model's state; of several ranks, the first has it."""
    ranks = setup.ranks
    if not adapter_files.is_saved_as_adapters(setup.model):
        return [], gathered(setup.model.state_dict(), ranks)

    files = adapter_files.adapter_files(setup.model)
    return [file._replace(tensors=gathered(file.tensors, ranks)) for file in files], {}


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """A plain copy of a model, of the same class, with its adapters added to the weights.

    It does not matter who made the adapters; of a PeftModel, the copy is of the model inside. The
    model stays as it is. Takes room on the device for a second, unquantised copy of the weights.

    Quantised layers become plain ones with the values they compute with: quantising the sum again,
    as peft does, would round most of an update away (a step of nf4 is 4 to 15 % of a block's
    range). Outputs equal those with adapters up to the rounding of the weights' dtype; int8 layers
    also round activations. A head that was tied to the embeddings, of which one has an adapter, is
    no longer tied.

    Raises:
        InputError: adapters of a kind that cannot be added to weights, such as learned prompts.
    """
    _check_mergeable(model)
    plain = base_of(copy.deepcopy(model))
    _untie_adapted(plain)

    dtype = _compute_dtype(plain)
    for parent, name, child in list(_replaced_layers(plain)):
        setattr(parent, name, _merged_layer(child, dtype or torch.get_default_dtype()))
    if dtype is not None:
        for parameter in plain.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                # a head that was trained in fp32 beside weights in bf16
                parameter.data = parameter.data.to(dtype)

    # by which transformers would save adapters alone
    for note in ("peft_config", "_hf_peft_config_loaded"):
        plain.__dict__.pop(note, None)
    _note_untied(plain)
    return plain


def _compute_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of embeddings, norms and heads beside quantised layers; None where all is
    trained."""
    for parameter in model.parameters():
        is_plain = parameter.is_floating_point() and parameter.itemsize > 1
        if is_plain and not parameter.requires_grad:
            return parameter.dtype
    return None


def _check_mergeable(model: Any) -> None:
    """Raise an InputError for what peft learns beside layers, or that replaces more than a
    layer."""
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        reason = "learns prompts, which are no part of any weight"
    elif getattr(config, "is_adaption_prompt", False):
        reason = "learns more than can be added to weights"
    else:
        return

    raise InputError(
        f"{config.peft_type.value} {reason}.",
        "Use the model as it is: output_dir/model holds what PeftModel.from_pretrained reads.",
    )


def _replaced_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(parent, name, layer) of every layer with adapters, trained copies or quantised weights."""
    for name, child in model.named_children():
        is_changed = is_adapter(child) or is_copy(child)
        if is_changed or is_quantised(child) or any(quantised_weights(child)):
            yield model, name, child
        else:
            yield from _replaced_layers(child)


def _merged_layer(layer: Any, dtype: torch.dtype) -> Any:
    """The plain layer that computes what a layer does with its adapters."""
    if is_copy(layer):
        if layer.disable_adapters:
            return layer.original_module
        return layer.unload_and_optionally_merge_module(
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
        if is_quantised(base):
            return dequantised(base, dtype)
        return base

    if is_quantised(base):
        delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
        return dequantised(base, dtype, delta)
    layer.merge()
    return base


def _untie_adapted(model: nn.Module) -> None:
    """Give every adapted layer its own weight, so that layers sharing it do not get its adapter.

    Rows of tokens that are trained (`trainable_token_indices`) are set, not added, in all layers
    that share them.
    """
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(map(id, module._parameters.values()))

    for module in filter(is_adapter, model.modules()):
        if adapts_parameter(module) or hasattr(module, "trainable_tokens_delta"):
            continue

        base: Any = module.get_base_layer()  # type: ignore[operator]
        weight = getattr(base, "weight", None)
        if isinstance(weight, nn.Parameter) and uses[id(weight)] > 1:
            base.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)


def _note_untied(model: Any) -> None:
    """Tell a transformers model that its head is no longer tied: it would tie the two again."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not config.get_text_config().tie_word_embeddings:
        return

    head = output_head(model)
    embedding = model.get_input_embeddings()
    if head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
