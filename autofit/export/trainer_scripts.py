"""What scripts around transformers' Trainer share: keys below a group for each object that they
make (`arguments`, `model`, `lora`, `quantization`), and lines that make adapters."""

from collections.abc import Mapping
from typing import Any

from autofit.export import shared_keys as shared
from autofit.export.template import call, keyword_arguments
from autofit.export.tool import Request, Share, ToolKeys


def under(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by their paths below a group."""
    return {f"{group}.{name}": value for name, value in values.items()}


def precision(request: Request) -> dict[str, Any]:
    """The dtypes of loaded weights and of those that are trained beside frozen ones."""
    trainer = shared.keywords(request, "precision")
    return {**under("model", trainer.model), "trained.dtype": trainer.trained_dtype}


def adapter_lines(keys: Mapping[str, Any], *adapt: str) -> list[str]:
    """Lines that adapt `model` by `adapt`, to which `lora` is known; none without adapters."""
    lora = keys.get("lora")
    if not lora:
        return []

    return [
        *call("lora = LoraConfig", keyword_arguments(lora), indent=0),
        *adapt,
        "for parameter in model.parameters():",
        "    if parameter.requires_grad:",
        f"        parameter.data = parameter.data.to(torch.{keys['trained']['dtype']})",
    ]


def environment_lines(keys: Mapping[str, Any]) -> dict[str, list[str]]:
    """The slots `os` and `environment`."""
    if not keys:
        return {"os": [], "environment": []}

    lines = [f'os.environ["{name}"] = "{value}"' for name, value in keys.items()]
    return {"os": ["import os"], "environment": [*lines, ""]}


def adapters_and_weights() -> dict[str, Share]:
    """The rows of knobs that such scripts give to LoraConfig and from_pretrained."""
    return {
        "lora_rank": lambda request: shared.lora_rank(request, "lora.r"),
        "lora_alpha": lambda request: shared.lora_alpha(request, "lora.lora_alpha"),
        "lora_dropout": lambda request: shared.lora_dropout(request, "lora.lora_dropout"),
        **shared.kinds_of_adapter("lora.use_dora", "lora.use_rslora"),
        "lora_plus": lambda request: ToolKeys(
            deviations=shared.keywords(request, "lora_plus").deviations
        ),
        "quantization": lambda request: ToolKeys(
            under("quantization", shared.keywords(request, "quantization").quantization)
        ),
        "attention": lambda request: shared.attention(request, "model."),
    }
