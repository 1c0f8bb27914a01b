"""Saving the trained model as its own library does (an adapter, a transformers model, or safetensors), and merging
adapters into a plain model."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from autofit.core.hardware import MIB
from autofit.setup import Setup
from autofit.setup.experts import adapts_parameter, plain_experts, quantised_weights
from autofit.techniques.quantization import dequantised, is_quantised
from autofit.training import atomic_writes

# peft's names of tasks; adapters for any other task are read by PeftModel alone.
_TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM", "sequence-classification": "SEQ_CLS"}


def save_model(setup: Setup, directory: Path) -> None:
    """Write the trained model so that its own library reads it; other files in the directory stay.

    With adapters: `adapter_model.safetensors` and `adapter_config.json`, for `PeftModel.from_pretrained(base,
    directory)`. A transformers model: for `from_pretrained(directory)`. Any other module: `model.safetensors`, for
    `safetensors.torch.load_model`.
    """
    is_adapted = bool(setup.config["lora_rank"])
    saved = (parameter for _, parameter in setup.trainable()) if is_adapted else setup.model.state_dict().values()
    needed = sum(tensor.numel() * tensor.itemsize for tensor in saved if isinstance(tensor, torch.Tensor)) + MIB
    with atomic_writes.atomic_files(directory, what="the trained model", needed_bytes=needed) as part:
        if is_adapted:
            _save_adapter(setup, part)
        elif callable(save_pretrained := getattr(setup.model, "save_pretrained", None)):
            save_pretrained(part)
        else:
            safetensors.torch.save_model(setup.model, str(part / "model.safetensors"))


def _save_adapter(setup: Setup, directory: Path) -> None:
    from peft import get_peft_model_state_dict

    model: Any = setup.model
    config = copy.copy(model.peft_config["default"])
    whole = {name: parameter for name, parameter in setup.trainable() if "lora_" not in name}  # a new head
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in whole}) or None
    config.task_type = _TASK_TYPES.get(setup.workload.task)
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.inference_mode = True
    # Embeddings are frozen, even where the head that they are tied to has adapters.
    weights = {**get_peft_model_state_dict(model, save_embedding_layers=False), **whole}
    # The names that PeftModel.from_pretrained looks for: it wraps the model twice.
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """A plain copy of a model, of the same class, with its adapters added to the weights; the model stays as it is.
    Takes room on the device for a second, unquantised copy of the weights. Quantised layers become plain ones with the
    values they compute with: quantising the sum again, as peft does, would round most of an update away (a step of nf4
    is 4 to 15 % of a block's range). Outputs equal those with adapters up to the rounding of the weights' dtype; int8
    layers also round activations. A head that was tied to the embeddings and has an adapter is no longer tied."""
    plain = copy.deepcopy(model)
    _untie_adapted(plain)
    # The compute dtype is that of the embeddings, norms and heads beside quantised layers.
    frozen = (p.dtype for p in plain.parameters() if not p.requires_grad and p.is_floating_point() and p.itemsize > 1)
    dtype = next(frozen, torch.get_default_dtype())
    for parent, name, child in list(_replaced_layers(plain)):
        setattr(parent, name, _merged_layer(child, dtype))
    for parameter in plain.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # a head that was trained in fp32 beside weights in bf16
    plain.__dict__.pop("peft_config", None)
    return plain


def _replaced_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(parent, name, layer) of every layer with adapters or quantised weights."""
    for name, child in model.named_children():
        if _is_adapted(child) or is_quantised(child) or any(quantised_weights(child)):
            yield model, name, child
        else:
            yield from _replaced_layers(child)


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _merged_layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    if any(quantised_weights(layer)) or adapts_parameter(layer):
        return plain_experts(layer, dtype)
    if is_quantised(layer):
        return dequantised(layer, dtype)
    base = layer.get_base_layer()
    if is_quantised(base):
        delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
        return dequantised(base, dtype, delta)
    layer.merge()
    return base  # type: ignore[no-any-return]


def _untie_adapted(model: nn.Module) -> None:
    """Give every adapted layer its own weight, so that its adapter is not added to layers that share it."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for module in filter(_is_adapted, model.modules()):
        if adapts_parameter(module):
            continue
        base: Any = module.get_base_layer()  # type: ignore[operator]
        if uses[id(base.weight)] > 1:
            base.weight = nn.Parameter(base.weight.detach().clone(), base.weight.requires_grad)
            config: Any = getattr(model, "config", None)
            if config is not None and hasattr(config, "get_text_config"):  # or transformers would tie the two again
                config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
