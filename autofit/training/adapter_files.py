"""The files of adapters, whoever made these, as `PeftModel.from_pretrained(base, directory)` reads them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.core.tasks import TASKS
from autofit.setup.adapters import (
    IN_PEFT_MODEL,
    adapter_in_use,
    adapter_parameters,
    base_of,
    new_token_rows,
    plain_name,
)


class AdapterFile(NamedTuple):
    """What is saved of one adapter: its tensors, and which parameters were trained beside it, by the model's names."""

    adapter: str
    tensors: dict[str, torch.Tensor]
    beside: tuple[str, ...] = ()


def is_saved_as_adapters(model: nn.Module) -> bool:
    """Whether adapters are all that is saved of a model: peft keeps their configs with it."""
    return bool(getattr(model, "peft_config", None))


def adapter_files(model: Any) -> list[AdapterFile]:
    """What is saved of each adapter, that in use first. With it goes what is trained beside adapters, as a new head."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    prefix = IN_PEFT_MODEL if base_of(model) is model else ""
    # Embeddings are as the base has them, unless they have new rows. peft would ask the hub.
    resized = new_token_rows(model) > 0
    in_use = adapter_in_use(model)

    files: list[AdapterFile] = []
    for adapter in sorted(model.peft_config, key=lambda name: name != in_use):
        own = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=resized
        )
        beside = (
            [name for name in _trained_beside(model) if name not in own]
            if adapter == in_use
            else []
        )
        own |= {name: state[name] for name in beside}
        files.append(
            AdapterFile(adapter, {f"{prefix}{name}": own[name] for name in own}, tuple(beside))
        )
    return files


def check_savable(model: nn.Module) -> None:
    """Refuse what is trained beside adapters and that their file cannot hold: a layer's own parameters beneath its
    adapter, or those of no module."""
    for name in adapter_files(model)[0].beside:
        if ".base_layer." in name or "." not in plain_name(name):
            message = f"{plain_name(name)} is trained beside adapters, and the file that peft reads cannot hold it."
            raise InputError(message, "Freeze it, or train without an output_dir.")


def write(model: Any, files: Sequence[AdapterFile], task: str, directory: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` of the adapter in use, which is the first; of others
    into folders of their names."""
    base = base_of(model)
    for number, file in enumerate(files):
        folder = directory / file.adapter if number else directory
        folder.mkdir(parents=True, exist_ok=True)
        tensors = _apart(file.tensors)
        safetensors.torch.save_file(
            tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"}
        )

        config = copy.copy(model.peft_config[file.adapter])
        if file.beside:
            modules = {plain_name(name).rpartition(".")[0] for name in file.beside}
            config.modules_to_save = sorted({*(config.modules_to_save or ()), *modules})
        # else PeftModel alone reads it
        config.task_type = config.task_type or TASKS[task].peft_type
        config.base_model_name_or_path = (
            config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
        )
        config.inference_mode = True
        origin = None
        if base is not model and config.task_type is None:  # by which AutoPeftModel finds the class
            origin = {
                "base_model_class": type(base).__name__,
                "parent_library": type(base).__module__,
            }
        config.save_pretrained(folder, auto_mapping_dict=origin)


def _trained_beside(model: nn.Module) -> list[str]:
    """The names of trained parameters that belong to no adapter."""
    of_adapters = adapter_parameters(model)
    return [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and name not in of_adapters
    ]


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the host, none of them sharing memory with another, as safetensors takes them."""
    apart: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.data_ptr() in addresses:
            plain = plain.clone()
        addresses.add(plain.data_ptr())
        apart[name] = plain
    return apart
