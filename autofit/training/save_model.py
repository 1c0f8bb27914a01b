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

from autofit.core.hardware import MIB
from autofit.distributed import Ranks
from autofit.setup import Setup
from autofit.setup.experts import adapts_parameter, plain_experts, quantised_weights
from autofit.setup.sharding import whole
from autofit.techniques.quantization import dequantised, is_quantised
from autofit.training import atomic_writes

# peft's names of tasks; adapters for any other task are read by PeftModel alone.
_TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM", "sequence-classification": "SEQ_CLS"}


def save_model(setup: Setup, directory: Path) -> None:
    """Write the trained model so that its own library reads it; other files in the directory stay.

    With adapters: `adapter_model.safetensors` and `adapter_config.json`, for `PeftModel.from_pretrained(base,
    directory)`. A transformers model: for `from_pretrained(directory)`. Any other module: `model.safetensors`, for
    `safetensors.torch.load_model`. Of several ranks, who call this together, the first writes; its host holds the
    trained weights meanwhile.
    """
    is_adapted = bool(setup.config["lora_rank"])
    saved: dict[str, Any] = dict(setup.trainable()) if is_adapted else setup.model.state_dict()
    needed = sum(each.numel() * each.itemsize for each in saved.values() if isinstance(each, torch.Tensor)) + MIB
    state = gathered(saved, setup.ranks)
    if not setup.ranks.is_first:
        return
    with atomic_writes.atomic_files(directory, what="the trained model", needed_bytes=needed) as part:
        if is_adapted:
            _save_adapter(setup, state, part)
        elif callable(save_pretrained := getattr(setup.model, "save_pretrained", None)):
            save_pretrained(part, state_dict=state) if setup.ranks.are_several else save_pretrained(part)
        elif setup.ranks.are_several:
            safetensors.torch.save_file(_each_once(state), part / "model.safetensors")
        else:
            safetensors.torch.save_model(setup.model, str(part / "model.safetensors"))


def _save_adapter(setup: Setup, state: dict[str, torch.Tensor], directory: Path) -> None:
    from peft import get_peft_model_state_dict

    model: Any = setup.model
    config = copy.copy(model.peft_config["default"])
    full = {name: tensor for name, tensor in state.items() if "lora_" not in name}  # a new head
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in full}) or None
    config.task_type = _TASK_TYPES.get(setup.workload.task)
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.inference_mode = True
    # Embeddings are frozen, even where the head that they are tied to has adapters.
    weights = {**get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False), **full}
    # The names that PeftModel.from_pretrained looks for: it wraps the model twice.
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)


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
