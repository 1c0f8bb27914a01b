"""Checkpoints: where a training run stands, written aside and renamed, so that half of one is never seen.

Holds what training changes: trainable weights and buffers, the optimizer's and the scaler's state, the step, and the
random number generators. Read with `weights_only=True`: a checkpoint cannot run code.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from autofit.core.errors import InputError
from autofit.setup import Setup

FILE_NAME = "checkpoint.pt"


def save(setup: Setup, directory: Path, next_step: int) -> Path:
    """Write the state after step `next_step - 1`; replaces the former checkpoint in one move."""
    assert setup.optimizer is not None, "build() sets the optimizer"
    state = {
        "made_by": _made_by(setup),
        "next_step": next_step,
        "weights": {name: parameter.detach() for name, parameter in setup.trainable()},
        "buffers": dict(setup.model.named_buffers()),
        "optimizer": setup.optimizer.state_dict(),
        "scaler": setup.scaler.state_dict() if setup.scaler else None,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if setup.device.type == "cuda" else None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path, aside = directory / FILE_NAME, directory / f".{FILE_NAME}.part"
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    return path


def _made_by(setup: Setup) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that goes on from it; a micro-batch may be another."""
    shapes = {name: list(parameter.shape) for name, parameter in setup.trainable()}
    # Those that say how the state is laid out, and those that say what the weights in it mean.
    names = ("optimizer", "optimizer_in_backward", "optimizer_offload", "lora_alpha", "quantization")
    layout = {knob: setup.config.get(knob) for knob in names}
    return {**layout, "weights": shapes}


def load(setup: Setup, directory: Path) -> int:
    """Bring a run to where its checkpoint stands; returns the step to go on with.

    Raises:
        InputError: there is none, it cannot be read, or it is of another model or config.
    """
    assert setup.optimizer is not None, "build() sets the optimizer"
    path = directory / FILE_NAME
    if not path.exists():
        raise InputError(
            f"there is no checkpoint to resume in {directory}.", "Leave out resume, or check the directory."
        )
    try:
        # To the host: each optimizer knows best what of its state belongs on the device, and an offloaded one none.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a file that is none it raises whatever it stumbles over, and pages of advice
        reason = type(error).__name__
        raise InputError(f"the checkpoint {path} cannot be read: {reason}.", "Train again without resume.") from error
    weights = dict(setup.trainable())
    if not isinstance(state, dict) or state.get("made_by") != _made_by(setup):
        raise InputError(f"the checkpoint {path} is of another model or config.", "Give the config it was made with.")
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(state["weights"][name])
        for name, buffer in setup.model.named_buffers():
            buffer.copy_(state["buffers"][name])
    setup.optimizer.load_state_dict(state["optimizer"])
    if setup.scaler and state["scaler"]:
        setup.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["rng"].cpu())
    if state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"].cpu())
    return int(state["next_step"])


def save_model(setup: Setup, directory: Path) -> None:
    """Write the trained model as its own library would: an adapter, a transformers model, or safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    if setup.config["lora_rank"]:
        _save_adapter(setup, directory)
    elif callable(save_pretrained := getattr(setup.model, "save_pretrained", None)):
        save_pretrained(directory)
    else:
        safetensors.torch.save_model(setup.model, str(directory / "model.safetensors"))


def _save_adapter(setup: Setup, directory: Path) -> None:
    from peft import get_peft_model_state_dict

    adapters: Any = setup.model.peft_config
    config = copy.copy(adapters["default"])
    whole = {name: parameter for name, parameter in setup.trainable() if "lora_" not in name}  # a new head
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in whole}) or None
    weights = {**get_peft_model_state_dict(setup.model), **whole}
    # The names that PeftModel.from_pretrained looks for: it wraps the model twice.
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    safetensors.torch.save_file(named, directory / "adapter_model.safetensors")
    config.save_pretrained(directory)
