"""The files of adapters, whoever made these, as `PeftModel.from_pretrained(base, directory)` reads
them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
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
from autofit.training.host_tensors import Tensors, detached


class AdapterFile(NamedTuple):
    """What is saved of one adapter: its tensors, and the names of parameters trained beside it."""

    adapter: str
    tensors: Tensors
    beside: tuple[str, ...] = ()


def is_saved_as_adapters(model: nn.Module) -> bool:
    """Whether adapters are all that is saved of a model: peft keeps their configs with it."""
    return bool(getattr(model, "peft_config", None))


def adapter_files(model: Any) -> list[AdapterFile]:
    """What is saved of each adapter, the one in use first.

    With that goes what is trained beside adapters, such as a new head.
    """
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    prefix = IN_PEFT_MODEL if base_of(model) is model else ""
    # Embeddings are as the base has them, unless they have new rows. peft would ask the hub.
    resized = new_token_rows(model) > 0
    in_use = adapter_in_use(model)

    files = []
    for adapter in sorted(model.peft_config, key=lambda name: name != in_use):
        own = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=resized
        )
        beside = []
        if adapter == in_use:
            beside = [name for name in _trained_beside(model) if name not in own]
            own |= {name: state[name] for name in beside}

        tensors = {f"{prefix}{name}": tensor for name, tensor in own.items()}
        files.append(AdapterFile(adapter, tensors, tuple(beside)))
    return files


def _trained_beside(model: nn.Module) -> list[str]:
    """The names of trained parameters that belong to no adapter."""
    of_adapters = adapter_parameters(model)
    names = []

    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in of_adapters:
            names.append(name)
    return names


def check_savable(model: nn.Module) -> None:
    """Refuse what is trained beside adapters and that their file cannot hold.

    These are a layer's own parameters beneath its adapter, and those of no module.
    """
    for name in adapter_files(model)[0].beside:
        plain = plain_name(name)
        if ".base_layer." in name or "." not in plain:
            raise InputError(
                f"{plain} is trained beside adapters, and the file that peft reads cannot hold it.",
                "Freeze it, or train without an output_dir.",
            )


def write(model: Any, files: Sequence[AdapterFile], task: str, directory: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` of the adapter in use, the first.

    Those of others go into folders of their names.
    """
    for number, file in enumerate(files):
        folder = directory
        if number:
            folder = directory / file.adapter
        folder.mkdir(parents=True, exist_ok=True)

        tensors = detached(file.tensors.items())
        path = folder / "adapter_model.safetensors"
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
        _write_config(model, file, task, folder)


def _write_config(model: Any, file: AdapterFile, task: str, folder: Path) -> None:
    """Write what peft reads beside an adapter's tensors."""
    base = base_of(model)
    config = copy.copy(model.peft_config[file.adapter])
    if file.beside:
        modules = set(config.modules_to_save or ())
        for name in file.beside:
            modules.add(plain_name(name).rpartition(".")[0])
        config.modules_to_save = sorted(modules)

    config.task_type = config.task_type or TASKS[task].peft_type  # else PeftModel alone reads it
    if not config.base_model_name_or_path:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True

    origin = None
    if base is not model and config.task_type is None:  # by which AutoPeftModel finds the class
        origin = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(folder, auto_mapping_dict=origin)
