"""What peft has put around a model and its layers: by autofit's `lora_rank`, by an earlier
training, or by the user (`get_peft_model`, `model.add_adapter`). Recognised by what peft names its
parts, so that peft stays unimported."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from autofit.core.errors import is_whole
from autofit.core.plain import UNREADABLE

# What names begin with in a PeftModel, and in the files that it reads.
IN_PEFT_MODEL = "base_model.model."
_WITHIN = (".base_layer", ".original_module")  # what names hold of the wrappers around a layer


def base_of(model: nn.Module) -> nn.Module:
    """The model that a PeftModel wraps; any other model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    if callable(get_base_model) and hasattr(model, "peft_config"):
        return get_base_model()  # type: ignore[no-any-return]
    return model


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter around a layer, or around a module that holds a parameter."""
    return "base_layer" in module._modules and hasattr(module, "adapter_layer_names")


def is_copy(module: nn.Module) -> bool:
    """Whether a module holds trained copies of a layer, or of rows of it, beside the layer
    (`modules_to_save`, `trainable_token_indices`)."""
    return "original_module" in module._modules and hasattr(module, "adapter_layer_names")


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters, or prompts that peft learns."""
    if getattr(model, "peft_config", None):
        return True
    return any(is_adapter(module) or is_copy(module) for module in model.modules())


def plain_name(name: str) -> str:
    """The name of a module or parameter, as it is without peft's wrappers around it."""
    name = name.removeprefix(IN_PEFT_MODEL)
    for part in _WITHIN:
        name = name.replace(part, "")
    return name


def adapter_in_use(model: Any) -> str:
    """The name of the adapter that is trained, the first where several are in use together."""
    for module in model.modules():
        if is_adapter(module) or is_copy(module):
            for name in module.active_adapters:
                if name in model.peft_config:
                    return str(name)
    return str(next(iter(model.peft_config)))


def adapter_parameters(model: nn.Module) -> set[str]:
    """The names of parameters that belong to adapters, in use or not."""
    prefixes = ["prompt_encoder."]
    for name, module in model.named_modules():
        if is_adapter(module) or is_copy(module):
            wrapper: Any = module
            prefixes += [f"{name}.{part}." for part in wrapper.adapter_layer_names]

    beginnings = tuple(prefixes)
    return {name for name, _ in model.named_parameters() if name.startswith(beginnings)}


def new_token_rows(model: nn.Module) -> int:
    """How many rows a frozen token embedding has beyond the vocabulary that the model was loaded
    with, as after `resize_token_embeddings`.

    0 where its config.json does not lie on this machine.
    """
    base: Any = base_of(model)
    path = str(getattr(base, "name_or_path", None) or "")
    embedding: Any = None
    if path and hasattr(base, "get_input_embeddings"):
        with suppress(NotImplementedError):  # a model without token embeddings
            embedding = base.get_input_embeddings()

    if not isinstance(embedding, nn.Embedding) or embedding.weight.requires_grad:
        return 0

    file: Any = Path(path, "config.json")
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            file = try_to_load_from_cache(path, "config.json")
        except HFValidationError:  # a directory that is gone
            return 0
        if not isinstance(file, str):
            return 0

    vocabulary = None
    with suppress(*UNREADABLE):
        saved = json.loads(Path(file).read_text(encoding="utf-8"))
        vocabulary = saved.get("vocab_size") or saved.get("text_config", {}).get("vocab_size")
    if not is_whole(vocabulary, 1):
        return 0
    return max(0, embedding.weight.shape[0] - vocabulary)
