"""The trained model as its own library would write it: an adapter, a transformers model, or safetensors.

And `merged`, which makes a plain model of one with adapters. What a run needs to go on is for `checkpoint`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from autofit.core.hardware import MIB
from autofit.setup import Setup
from autofit.techniques.quantization import dequantised, is_quantised
from autofit.training import atomic_writes

# What peft's classes for a task go by. Others read the adapter by PeftModel alone.
_TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM", "sequence-classification": "SEQ_CLS"}


def save_model(setup: Setup, directory: Path) -> None:
    """Write the trained model so that its own library reads it; other files in the directory stay.

    With adapters: `adapter_model.safetensors` and `adapter_config.json`, for `PeftModel.from_pretrained(base,
    directory)`. A transformers model: for `from_pretrained(directory)`. Any other module: `model.safetensors`, for
    `safetensors.torch.load_model`.

    Raises:
        InputError: no room, or no right to write.
    """
    adapted = bool(setup.config["lora_rank"])
    written = (parameter for _, parameter in setup.trainable()) if adapted else setup.model.state_dict().values()
    needed = sum(tensor.numel() * tensor.itemsize for tensor in written if isinstance(tensor, torch.Tensor)) + MIB
    with atomic_writes.written_into(directory, what="the trained model", needed_bytes=needed) as aside:
        if adapted:
            _save_adapter(setup, aside)
        elif callable(save_pretrained := getattr(setup.model, "save_pretrained", None)):
            save_pretrained(aside)
        else:
            safetensors.torch.save_model(setup.model, str(aside / "model.safetensors"))


def _save_adapter(setup: Setup, directory: Path) -> None:
    from peft import get_peft_model_state_dict

    model: Any = setup.model
    config = copy.copy(model.peft_config["default"])
    whole = {name: parameter for name, parameter in setup.trainable() if "lora_" not in name}  # a new head
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in whole}) or None
    config.task_type = _TASK_TYPES.get(setup.workload.task)
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.inference_mode = True
    # Embeddings are frozen, also where adapters lie beside the head that they are tied to.
    weights = {**get_peft_model_state_dict(model, save_embedding_layers=False), **whole}
    # The names that PeftModel.from_pretrained looks for: it wraps the model twice.
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    safetensors.torch.save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """A plain copy of a model, of the same class, with its adapters added to the weights; the model stays as it is.

    Takes room for a second copy of the weights on the device, as large as they are unquantised. Quantised layers become
    plain ones with the values they compute with: adding the adapters to them and quantising the sum again, as peft
    does, would round most of an update away: a step of nf4 is 4 to 15 % of a block's range. So the outputs are those of
    the model with adapters up to the rounding of the weights' dtype, but for int8, whose products round activations
    too. A head that was tied to the embeddings and has an adapter is no longer tied.
    """
    plain = copy.deepcopy(model)
    _untie_adapted(plain)
    dtype = _dtype(plain)
    for parent, name, child in list(_places(plain)):
        setattr(parent, name, _merged_layer(child, dtype))
    for parameter in plain.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # a head that was trained in fp32 beside weights in bf16
    plain.__dict__.pop("peft_config", None)
    return plain


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(parent, name, layer) of what is to be exchanged: layers with adapters, and quantised ones without."""
    for name, child in model.named_children():
        if _is_adapted(child) or is_quantised(child):
            yield model, name, child
        else:
            yield from _places(child)


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _merged_layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    if is_quantised(layer):
        return dequantised(layer, dtype)
    base = layer.get_base_layer()
    if is_quantised(base):
        delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
        return dequantised(base, dtype, delta)
    layer.merge()
    return base  # type: ignore[no-any-return]


def _untie_adapted(model: nn.Module) -> None:
    """Give every adapted layer a weight of its own: what is added to it is not meant for who shares it."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for module in model.modules():
        if _is_adapted(module):
            base: Any = module.get_base_layer()  # type: ignore[operator]
            if uses[id(base.weight)] > 1:
                base.weight = nn.Parameter(base.weight.detach().clone(), base.weight.requires_grad)
                _tell_untied(model)


def _tell_untied(model: Any) -> None:
    """transformers would tie the two again when it reads what was saved."""
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def _dtype(model: nn.Module) -> torch.dtype:
    """That of the weights that are as the model computes: of embeddings, norms and heads beside quantised layers."""
    frozen = (p.dtype for p in model.parameters() if not p.requires_grad and p.is_floating_point() and p.itemsize > 1)
    return next(frozen, torch.get_default_dtype())
