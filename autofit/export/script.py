"""train.py: the found config as a stand-alone script, as one would write it by hand for just this model and config.

It repeats what `training` does with the same config, in plain torch, transformers, peft and bitsandbytes; the names of
autofit's own code stay out of it. What a knob adds is in `fragments`, what a task adds in `tasks`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.export.fragments import KNOBS, Fragments, is_off
from autofit.export.head import head
from autofit.export.tasks import TASKS, Task
from autofit.export.template import WIDTH, fill, literal, plain, template

_NOT_ARCHITECTURE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "auto_map",
    "id2label",
    "label2id",
)
_STANDARD = ("import argparse", "import math", "import sys", "import time")
_INSTEAD = "Run it with `autofit train`."
# What probes run under: with fixed segments the same config may not fit a card, and threads that spin while they wait
# make a busy machine many times slower.
_EARLY = {
    "cuda": 'os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")',
    "cpu": 'os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")',
}


def train_script(
    *,
    model: str,
    workload: Mapping[str, Any],
    source: Mapping[str, Any],
    model_config: Mapping[str, Any] | None,
    config: Config,
    measured: Mapping[str, Any] | None,
    versions: Mapping[str, str],
    hardware: Hardware | Mapping[str, Any],
) -> str | None:
    """The text of a train.py that runs `config` without autofit; None for a model that is not of transformers.

    Args:
        workload: Workload.summary(); `source`: where the model came from; `model_config`: its config as transformers
            writes it, with `model_type`.
        measured: Measurement.to_measured(), for the head comment.

    Raises:
        InputError: the config uses something that the script cannot express, or its batch sizes contradict.
    """
    task = TASKS.get(str(workload.get("task")))
    if task is None or not model_config or "model_type" not in model_config or source.get("kind") == "function":
        return None
    _check_labels(task, model_config)
    facts = hardware.to_dict() if isinstance(hardware, Hardware) else dict(hardware)
    batch = _Batch.of(config, int(workload["effective_batch_size"]))
    fragments = _fragments(config, str(workload["task"]))
    packages = _packages(fragments)
    title = f"Train {plain(model)} ({workload['task']}) as autofit measured it."
    slots = {
        "title": textwrap.shorten(title, WIDTH - 6, placeholder=" ..."),
        "head": head(facts, config, measured=measured, versions=versions, packages=packages),
        "imports": _imports(task, fragments, str(facts["device"])),
        "device": str(facts["device"]),
        "constants": _constants(task, batch, workload.get("sequence_length")),
        "architecture": literal(_architecture(task, model_config), used=len("ARCHITECTURE = ")),
        "data": "\n\n".join(template(name) for name in task.data),
        "build_model": _build_model(task, fragments, str(facts["device"])),
        "build_optimizer": _build_optimizer(fragments),
        "train_step": _train_step(task, fragments, batch),
    }
    return fill(template("train"), {**slots, "main": _main(task, fragments)})


@dataclass(frozen=True)
class _Batch:
    """How the effective batch is cut."""

    effective: int
    micro: int

    @classmethod
    def of(cls, config: Config, effective: int) -> _Batch:
        micro = int(config.get("micro_batch_size") or effective)
        steps = int(config.get("gradient_accumulation_steps") or effective // micro)
        if micro * steps != effective:
            message = f"micro_batch_size {micro} x gradient_accumulation_steps {steps} is not the effective batch"
            raise InputError(f"{message} of {effective}.", "Search again, or correct the config.")
        return cls(effective, micro)

    @property
    def split(self) -> bool:
        return self.micro < self.effective


def _check_labels(task: Task, model_config: Mapping[str, Any]) -> None:
    """The script reads class numbers; targets of other kinds come in shapes that it cannot know."""
    kind = model_config.get("problem_type") or "single_label_classification"
    if task.classes and (kind != "single_label_classification" or _classes(model_config) == 1):
        what = "regression" if _classes(model_config) == 1 else str(kind)
        raise InputError(f"train.py cannot be written for {what}: it reads class labels.", _INSTEAD)


def _fragments(config: Config, task: str) -> Fragments:
    """What all knobs add, together.

    Raises:
        InputError: a knob or a value of one that nothing is known of here.
    """
    together = Fragments()
    names = (*KNOBS, *(name for name in config if name not in KNOBS))
    for name in names:
        added = KNOBS[name](config, task) if name in KNOBS else Fragments() if is_off(config[name]) else None
        if added is None:
            raise InputError(f"train.py cannot express {name} {config[name]}.", _INSTEAD)
        together = together.joined(added)
    return together


def _packages(fragments: Fragments) -> list[str]:
    """What the script needs to be installed."""
    return ["torch", "transformers", *(line.split()[1].split(".")[0] for line in fragments.imports)]


def _imports(task: Task, fragments: Fragments, device: str) -> list[str]:
    standard = sorted([*_STANDARD, *task.standard, "import os"])
    classes = ["AutoConfig", task.auto_class, *(["AutoTokenizer"] if task.text else [])]
    library = [*task.imports, *fragments.imports, f"from transformers import {', '.join(classes)}"]
    early = ["", "# As measured; read when torch is loaded.", _EARLY[device]]
    return [*standard, "from pathlib import Path", *early, "", "import torch", *sorted(library)]


def _constants(task: Task, batch: _Batch, sequence_length: int | None) -> list[str]:
    lines = [f"SEQUENCE_LENGTH = {sequence_length}  # tokens"] if task.text else []
    lines.append(f"EFFECTIVE_BATCH_SIZE = {batch.effective}  # samples per optimizer step")
    if batch.split:
        lines.append(f"MICRO_BATCH_SIZE = {batch.micro}  # samples that go through the model at once")
    return lines


def _architecture(task: Task, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what says nothing about the architecture; class names shrink to their number."""
    kept = {name: value for name, value in model_config.items() if name not in _NOT_ARCHITECTURE}
    ordered = {"model_type": kept.pop("model_type"), **kept}
    return {**ordered, "num_labels": _classes(model_config)} if task.classes else ordered


def _classes(model_config: Mapping[str, Any]) -> int:
    """Outputs of a classifier: transformers counts the names in id2label, and takes 2 where there are none."""
    return len(model_config.get("id2label") or ()) or int(model_config.get("num_labels") or 2)


def _build_model(task: Task, fragments: Fragments, device: str) -> list[str]:
    settings = {"config": "config", **fragments.settings}
    items = [f'"{name}": {value}' for name, value in settings.items()]
    flat = f"settings = {{{', '.join(items)}}}"
    load = f"model = {task.auto_class}.from_pretrained(weights, **settings)"
    heads = [  # a head of other classes is new
        f"model = {task.auto_class}.from_pretrained(",
        "    weights, ignore_mismatched_sizes=True, **settings",
        ")",
    ]
    make = f"model = {task.auto_class}.from_config(**settings)"
    grown = "config.num_labels = max(config.num_labels, classes)"
    return fill(
        template("build_model"),
        {
            "build_parameters": "weights, classes" if task.classes else "weights",
            "held": fragments.held or "",
            "configure": [*task.configure, *([grown] if task.classes else [])],
            "settings": [flat] if len(flat) + 4 <= WIDTH else ["settings = {", *(f"    {i}," for i in items), "}"],
            "load_weights": heads if task.classes else [load],
            "random_weights": ["with torch.device(DEVICE):", f"    {make}"] if device == "cuda" else [make],
            "adapt": fragments.adapt,
        },
    ).splitlines()


def _build_optimizer(fragments: Fragments) -> str:
    assert fragments.optimizer, "the optimizer's row always makes one"
    words, call = fragments.optimizer
    return fill(template("build_optimizer"), {"optimizer": words, "optimizer_call": call})


def _train_step(task: Task, fragments: Fragments, batch: _Batch) -> str:
    name = "micro_batch" if batch.split else "batch"
    loss = f"loss = model(**{name}{task.forward_arguments}).loss"
    context = fragments.forward
    scaled = bool(fragments.scaler)
    step = fill(
        template("step_split" if batch.split else "step_whole"),
        {
            "step_arguments": _step_arguments(fragments),
            "to_device": _to_device(name, task, fragments),
            "forward": [f"with {context}:", f"    {loss}"] if context else [loss],
            "backward": "scaler.scale(loss).backward()" if scaled else "loss.backward()",
            "update": [
                *(["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]),
                "optimizer.zero_grad()",
            ],
        },
    )
    return f"{template(task.count)}\n\n{step}" if batch.split else step


def _step_arguments(fragments: Fragments) -> str:
    return "model, optimizer, batch, scaler" if fragments.scaler else "model, optimizer, batch"


def _to_device(name: str, task: Task, fragments: Fragments) -> list[str]:
    lines = [f"{name} = {{key: tensor.to(DEVICE) for key, tensor in {name}.items()}}"]
    if fragments.input_dtype and "images" in task.data:
        lines.append(f'{name}["pixel_values"] = {name}["pixel_values"].to({fragments.input_dtype})')
    return lines


def _main(task: Task, fragments: Fragments) -> str:
    tokenizer = 'add("--tokenizer", help="name or directory; else beside the weights, else bytes")'
    per_step = "EFFECTIVE_BATCH_SIZE * SEQUENCE_LENGTH" if task.unit == "tokens" else "EFFECTIVE_BATCH_SIZE"
    keep = ("if tokenizer:", "    tokenizer.save_pretrained(args.output)") if task.text else ()
    return fill(
        template("main"),
        {
            "data_help": task.data_help,
            "tokenizer_argument": [tokenizer] if task.text else [],
            "start": fragments.start,
            "load": task.load,
            "scaler": [f"scaler = {fragments.scaler}"] if fragments.scaler else [],
            "sample_key": task.sample_key,
            "batch": task.batch,
            "step_arguments": _step_arguments(fragments),
            "units": per_step,
            "unit": task.unit,
            "save": [*(fragments.save or ("model.save_pretrained(args.output)",)), *keep],
        },
    )
