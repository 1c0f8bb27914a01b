"""Checkpoints: where a training run stands, one directory for each, whole or not there at all.

`checkpoints/step-00000200/` holds what training changes after 200 steps: the weights that are trained and the buffers
(safetensors), the state of optimizer, scaler, random numbers and data (a file read with `weights_only=True`, which
cannot run code), and `checkpoint.yaml`, which says of what run it is and what the other files add up to. How a
directory comes to be whole is for `durable`; the trained model, for `saving`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from autofit.core import strict_yaml
from autofit.core.errors import InputError
from autofit.core.hardware import MIB
from autofit.setup import Setup
from autofit.setup.host_copies import plain_tensors
from autofit.techniques import all_techniques
from autofit.training import atomic_writes, random_state

FOLDER = "checkpoints"
_LABEL, _WEIGHTS, _BUFFERS, _STATE = "checkpoint.yaml", "weights.safetensors", "buffers.safetensors", "state.pt"
_FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})")
# Knobs that lay out the optimizer's state; and those that say how a batch is cut, which is the same learning.
_LAYOUT = ("optimizer", "optimizer_in_backward", "optimizer_offload")
_CUTS = ("micro_batch_size", "gradient_accumulation_steps")
_SAMPLES = 16  # values of a frozen weight that tell it from another one


@dataclass(frozen=True)
class Loaded:
    """Where a run goes on: the next step, what was kept of the data's position, and what the user should know."""

    next_step: int
    data_state: Any = None
    notes: tuple[str, ...] = ()


class _DamagedError(Exception):
    """A checkpoint that is not what was written."""


def exists(directory: Path) -> bool:
    """Whether an output directory holds a checkpoint."""
    return bool(_steps(directory))


def save(setup: Setup, directory: Path, next_step: int, *, keep_last: int = 2, data_state: Any = None) -> Path:
    """Write the state after step `next_step - 1`; then remove all but the last `keep_last` checkpoints.

    Beside a GPU, the host holds a copy of the trained weights meanwhile. `data_state` are plain values and tensors, in
    lists, tuples and dicts.

    Raises:
        InputError: no room, no right to write, or `data_state` could not be read back; former checkpoints stay.
    """
    check_counts(keep_last=keep_last)
    weights, buffers = _detached(setup.trainable()), _detached(setup.model.named_buffers())
    state = _state(setup, data_state)
    label = _label(setup, next_step)
    path = directory / FOLDER / f"step-{next_step:08d}"
    needed = _bytes((weights, buffers, state)) + MIB
    with atomic_writes.written_whole(path, what=f"the checkpoint of step {next_step}", needed_bytes=needed) as aside:
        safetensors.torch.save_file(weights, aside / _WEIGHTS)
        safetensors.torch.save_file(buffers, aside / _BUFFERS)
        with (aside / _STATE).open("wb") as file:  # by its path, torch would not tell what the system says of a failure
            torch.save(state, file)
        sums = {name: atomic_writes.checksum(aside / name) for name in (_WEIGHTS, _BUFFERS, _STATE)}
        (aside / _LABEL).write_text(strict_yaml.dump({**label, "crc32": sums}), encoding="utf-8")
    _retire(directory, next_step, keep_last)
    return path


def check_counts(**given: object) -> None:
    """Raises InputError unless each is a number of steps or of checkpoints: at least one."""
    for name, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} must be a whole number from 1, not {count!r}.", f"For example {name}=2.")


def load(setup: Setup, directory: Path) -> Loaded:
    """Bring a run to where its newest checkpoint stands, or the one before it where that is damaged.

    Raises:
        InputError: there is none, none can be read, or it is of another model or config.
    """
    damaged: list[str] = []
    for step, path in _steps(directory):
        try:
            label = _read_label(path)
            if label["next_step"] != step:
                raise _DamagedError(f"{_LABEL} is not what was written")
            _agree(path, _configs_differ(setup, label))
            contents = _read_contents(path, label)
        except _DamagedError as error:
            damaged.append(f"the checkpoint of step {step} is damaged ({error})")
            continue
        _agree(path, _weights_differ(setup, label, contents[_WEIGHTS]))
        _apply(setup, contents)
        notes = [f"{reason}; training goes on from that of step {label['next_step']}." for reason in damaged]
        return Loaded(label["next_step"], contents[_STATE]["data"], (*notes, *_told_otherwise(setup, label)))
    if damaged:
        raise InputError(f"no checkpoint in {directory} can be read: {damaged[0]}.", "Train again without resume.")
    raise InputError(f"there is no checkpoint to resume in {directory}.", "Leave out resume, or check the directory.")


# Writing.


def _state(setup: Setup, data_state: Any) -> dict[str, Any]:
    assert setup.optimizer is not None, "build() sets the optimizer"
    _check_readable(data_state, "the loader")
    return {
        "optimizer": setup.optimizer.state_dict(),
        "scaler": setup.scaler.state_dict() if setup.scaler else None,
        "random": random_state.capture(setup.device),
        "data": data_state,
    }


def check_savable(setup: Setup) -> None:
    """Find what no checkpoint or saved model can hold, before training rather than at the first one.

    Raises:
        InputError: a sparse tensor, state of a module or options of the optimizer that are no plain values or tensors.
    """
    assert setup.optimizer is not None, "build() sets the optimizer"
    leave_out = "Leave it out, or train without an output_dir."
    state = {} if setup.config["lora_rank"] else setup.model.state_dict()  # of adapters, peft saves what it knows
    for name, value in (*setup.model.named_buffers(), *state.items()):
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{name} of the model's state is no tensor, and safetensors holds no other.", leave_out)
        if value.layout is not torch.strided:
            raise InputError(f"{name} is a sparse tensor, which safetensors cannot hold.", leave_out)
    groups = [
        {name: value for name, value in each.items() if name != "params"} for each in setup.optimizer.param_groups
    ]
    _check_readable(groups, "the optimizer")


def _check_readable(state: Any, owner: str) -> None:
    """What cannot be read back without running code must not be written: it would be found out when it is needed."""
    written = io.BytesIO()
    try:
        torch.save(state, written)
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except Exception as error:
        message = f"the state_dict of {owner} holds more than plain values and tensors, which is not safe to load."
        raise InputError(message, "Leave out what is neither, such as objects of classes of your own.") from error


def _label(setup: Setup, next_step: int) -> dict[str, Any]:
    """What a reader wants to know, and what the run that goes on must agree on."""
    return {
        "autofit_checkpoint": _FORMAT,
        "next_step": next_step,
        "model": setup.workload.name,
        "effective_batch_size": setup.workload.effective_batch_size,
        "config": dict(setup.config),
        "hyperparameters": asdict(setup.hyperparameters),
        "frozen_weights": _frozen_digest(setup),
        "versions": {"torch": str(torch.__version__)},
    }


def _frozen_digest(setup: Setup) -> str:
    """Tells apart the weights that are not trained, which a checkpoint holds none of, by some values of each.

    Read from the state dict, where also weights are that rest on the host. Quantised ones are left out: their bits
    depend on the device that rounded them.
    """
    frozen = {name for name, parameter in setup.model.named_parameters() if not parameter.requires_grad}
    digest = hashlib.sha256()
    for name, tensor in setup.model.state_dict().items():
        if name in frozen and tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
            values = tensor.detach().reshape(-1)[:: -(-tensor.numel() // _SAMPLES)]
            digest.update(name.encode() + values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _detached(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors as safetensors takes them: on the host, contiguous, and none sharing memory with another."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named:
        if tensor.dtype is torch.complex128:
            raise InputError(f"{name} is of complex128, which safetensors cannot hold.", "Make it complex64.")
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.numel() * plain.itemsize:
            plain = plain.clone(memory_format=torch.contiguous_format)
        seen.add(storage.data_ptr())
        found[name] = plain
    return found


def _bytes(value: Any) -> int:
    """What the tensors in nested containers take, each storage once."""
    storages: dict[int, int] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            plain = [tensor.untyped_storage() for tensor in plain_tensors(each)]
            storages |= {storage.data_ptr(): storage.nbytes() for storage in plain}
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return sum(storages.values())


def _retire(directory: Path, next_step: int, keep_last: int) -> None:
    """Remove the checkpoints before the last ones; and those of later steps, which could not be read on the way here:
    they would stand for the newest."""
    kept = 0
    for step, path in _steps(directory):
        kept += step <= next_step
        if step > next_step or kept > keep_last:
            atomic_writes.remove(path)


# Reading.


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints of an output directory by their steps, the newest first."""
    named = ((_STEP.fullmatch(name), path) for name, path in atomic_writes.whole(directory / FOLDER))
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _read_label(path: Path) -> dict[str, Any]:
    kinds = {"autofit_checkpoint": int, "next_step": int, "config": dict, "hyperparameters": dict, "crc32": dict}
    try:
        label = strict_yaml.load_mapping(path / _LABEL)
    except InputError as error:
        raise _DamagedError(f"{_LABEL} cannot be read") from error
    if not all(isinstance(label.get(name), kind) for name, kind in kinds.items()):
        raise _DamagedError(f"{_LABEL} is not what was written")
    if label["autofit_checkpoint"] != _FORMAT:
        message = f"the checkpoint {path} is of format {label['autofit_checkpoint']}, this autofit reads {_FORMAT}."
        raise InputError(message, "Resume it with the autofit that wrote it.")
    return label


def _read_contents(path: Path, label: dict[str, Any]) -> dict[str, Any]:
    """What every other file holds, all of them checked before any is used."""
    contents: dict[str, Any] = {}
    for name in (_WEIGHTS, _BUFFERS, _STATE):
        try:
            if atomic_writes.checksum(path / name) != label["crc32"].get(name):
                raise _DamagedError(f"{name} is not what was written")
            contents[name] = _read_state(path / name) if name == _STATE else safetensors.torch.load_file(path / name)
        except OSError as error:
            raise _DamagedError(f"{name} cannot be read: {error.strerror}") from error
    return contents


def _read_state(path: Path) -> dict[str, Any]:
    """To the host: each optimizer knows best what of its state belongs on the device, and an offloaded one none.

    Tensors of a library's own kind (torchao's) are let through because that library, loaded with the optimizer, has
    named them to torch as safe.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of what it does not know it raises whatever it stumbles over, and pages of advice
        raise _DamagedError(f"{path.name} cannot be read ({type(error).__name__})") from error
    return state


def _agree(path: Path, differences: list[str]) -> None:
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        message = f"the checkpoint {path} is of another model or config: {'; '.join(differences[:3])}{more}."
        raise InputError(message, "Give the model and config it was made with.")


def _configs_differ(setup: Setup, label: dict[str, Any]) -> list[str]:
    """Where the two would not learn the same, or lay out their state in another way."""
    found: list[str] = []
    for knob in all_techniques():
        mine, theirs = setup.config.get(knob.name, knob.off), label["config"].get(knob.name, knob.off)
        same = knob.exact(mine, setup.workload) and knob.exact(theirs, setup.workload)
        if mine != theirs and knob.name not in _CUTS and (knob.name in _LAYOUT or not same):
            found.append(f"{knob.name} {_word(mine)}, checkpoint has {_word(theirs)}")
    return found


def _word(value: Any) -> str:
    """A value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _weights_differ(setup: Setup, label: dict[str, Any], kept: dict[str, torch.Tensor]) -> list[str]:
    mine = {name: list(parameter.shape) for name, parameter in setup.trainable()}
    theirs = {name: list(tensor.shape) for name, tensor in kept.items()}
    both = [name for name in mine if name in theirs]
    found = [f"weight {n} {mine[n]}, checkpoint has {theirs[n]}" for n in both if mine[n] != theirs[n]]
    found += [f"weight {name} is trained, checkpoint has none" for name in mine if name not in theirs]
    found += [f"weight {name} is not trained, checkpoint has one" for name in theirs if name not in mine]
    if not found and label.get("frozen_weights") != _frozen_digest(setup):
        found = ["the frozen weights are not those that it was trained beside"]
    return found


@torch.no_grad()
def _apply(setup: Setup, contents: dict[str, Any]) -> None:
    """Put everything where it belongs. Weight decay stays as this run was told, as the learning rate does."""
    assert setup.optimizer is not None, "build() sets the optimizer"
    for name, parameter in setup.trainable():
        parameter.copy_(contents[_WEIGHTS][name])
    for name, values in contents[_BUFFERS].items():
        _set_buffer(setup, name, values)
    state = contents[_STATE]
    decays = [group.get("weight_decay") for group in setup.optimizer.param_groups]  # not every optimizer has one
    setup.optimizer.load_state_dict(state["optimizer"])
    for group, decay in zip(setup.optimizer.param_groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = decay
    if setup.scaler and state["scaler"]:
        setup.scaler.load_state_dict(state["scaler"])
    random_state.restore(state["random"], setup.device)


def _set_buffer(setup: Setup, name: str, values: torch.Tensor) -> None:
    """In place; a buffer that a model makes or replaces while it runs has no such place yet."""
    parent, _, own = name.rpartition(".")
    buffers = setup.model.get_submodule(parent)._buffers
    buffer = buffers.get(own)
    if buffer is not None and buffer.shape == values.shape:
        buffer.copy_(values)
    else:
        buffers[own] = values.to(setup.device)


def _told_otherwise(setup: Setup, label: dict[str, Any]) -> list[str]:
    """What the run that goes on was told to learn by, where that is not what the checkpoint was made with."""
    mine = {**asdict(setup.hyperparameters), "effective_batch_size": setup.workload.effective_batch_size}
    theirs = {**label["hyperparameters"], "effective_batch_size": label.get("effective_batch_size")}
    return [
        f"{name} is {_word(mine[name])} from here on, before it was {_word(theirs[name])}."
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    ]
