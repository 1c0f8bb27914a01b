"""train.py: the found config as a stand-alone script, as one would write it by hand for just this model and config.

It repeats what `training` does with the same config, in plain torch and the libraries behind the techniques; the names
of autofit's own code stay out of it. What a knob adds is in `knobs`, what a task adds in `tasks`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.export.fragments import Case, Fragments
from autofit.export.head import head
from autofit.export.knobs import KNOBS, is_off
from autofit.export.tasks import TASKS, Task
from autofit.export.template import WIDTH, fill, import_from, literal, plain, template

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

_OPTIMIZER = {
    False: "optimizer = build_optimizer(model, args.lr, args.weight_decay)",
    True: "step_in_backward(model, args.lr, args.weight_decay)",
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
    device, length = str(facts["device"]), workload.get("sequence_length")
    fragments = _fragments(Case(config, str(workload["task"]), device, batch.micro, length, model_config, versions))
    packages = _packages(fragments)
    title = f"Train {plain(model)} ({workload['task']}) as autofit measured it."
    slots = {
        "title": textwrap.shorten(title, WIDTH - 6, placeholder=" ..."),
        "head": head(facts, config, measured=measured, versions=versions, packages=packages),
        "imports": _imports(task, fragments, device),
        "device": device,
        "constants": [*_constants(task, batch, length), *fragments.constants],
        "architecture": literal(_architecture(task, model_config), used=len("ARCHITECTURE = ")),
        "data": "\n\n".join(template(name) for name in task.data),
        "build_model": "\n\n".join([*fragments.functions, _build_model(task, fragments, device)]),
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


def _fragments(case: Case) -> Fragments:
    """What all knobs add, together.

    Raises:
        InputError: a knob or a value of one that nothing is known of here.
    """
    together = Fragments()
    config = case.config
    for name in (*KNOBS, *(name for name in config if name not in KNOBS)):
        added = KNOBS[name](case) if name in KNOBS else Fragments() if is_off(config[name]) else None
        if added is None:
            raise InputError(f"train.py cannot express {name} {config[name]}.", _INSTEAD)
        together = together.joined(added)
    return together


def _packages(fragments: Fragments) -> list[str]:
    """What the script needs to be installed, by the names of distributions."""
    modules = [line.split()[1].partition(".")[0].replace("_", "-") for line in fragments.imports]
    return list(dict.fromkeys(["torch", "transformers", *modules, *fragments.packages]))


def _imports(task: Task, fragments: Fragments, device: str) -> list[str]:
    standard = sorted(
        {*_STANDARD, *task.standard, *fragments.standard, "import os", "from pathlib import Path"}, key=_place
    )
    classes = ["AutoConfig", task.auto_class]
    classes += ["AutoTokenizer"] if task.text else []
    classes += ["BitsAndBytesConfig"] if fragments.quantization else []
    library = {*task.imports, *fragments.imports, "import torch", import_from("transformers", *classes)}
    early = ["", "# As measured; read when torch is loaded.", _EARLY[device]]
    return [*standard, *early, "", *sorted(library, key=_place)]


def _place(line: str) -> tuple[bool, str]:
    """Plain imports before the others, each kind by the alphabet."""
    return line.startswith("from "), line


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


def _build_model(task: Task, fragments: Fragments, device: str) -> str:
    settings = {"config": "config", **fragments.settings}
    items = [f'"{name}": {value}' for name, value in settings.items()]
    flat = f"settings = {{{', '.join(items)}}}"
    grown = "config.num_labels = max(config.num_labels, classes)"
    slots = {
        "build_parameters": "weights, classes" if task.classes else "weights",
        "held": fragments.held or "",
        "configure": [*task.configure, *([grown] if task.classes else [])],
        "settings": [flat] if len(flat) + 4 <= WIDTH else ["settings = {", *(f"    {i}," for i in items), "}"],
        "auto_class": task.auto_class,
        "adapt": fragments.adapt,
    }
    if fragments.quantization:
        slots["quantized_to"] = fragments.quantized_to
        slots["quantization"] = [f"{argument}," for argument in fragments.quantization]
        slots["mismatched"] = ["ignore_mismatched_sizes=True,"] if task.classes else []
        return fill(template("build_quantized"), slots)
    load = f"model = {task.auto_class}.from_pretrained(weights, **settings)"
    heads = [  # a head of other classes is new
        f"model = {task.auto_class}.from_pretrained(",
        "    weights, ignore_mismatched_sizes=True, **settings",
        ")",
    ]
    make = f"model = {task.auto_class}.from_config(**settings)"
    slots["load_weights"] = heads if task.classes else [load]
    slots["random_weights"] = ["with torch.device(DEVICE):", f"    {make}"] if device == "cuda" else [make]
    return fill(template("build_model"), slots)


def _build_optimizer(fragments: Fragments) -> str:
    assert fragments.optimizer, "the optimizer's row always makes one"
    words, call = fragments.optimizer
    name = "step_in_backward" if fragments.stepped_in_backward else "build_optimizer"
    return fill(template(name), {"optimizer": words, "optimizer_call": call})


def _train_step(task: Task, fragments: Fragments, batch: _Batch) -> str:
    name = "micro_batch" if batch.split else "batch"
    step = fill(
        template("step_split" if batch.split else "step_whole"),
        {
            "step_arguments": _step_arguments(fragments),
            "to_device": _to_device(name, task, fragments),
            "compute": _computation(name, task, fragments, split=batch.split),
            "update": _update(fragments),
        },
    )
    return f"{template(task.count)}\n\n{step}" if batch.split else step


def _computation(name: str, task: Task, fragments: Fragments, *, split: bool) -> list[str]:
    """Forward and backward of a batch, in the contexts that surround them."""
    loss = f"{fragments.loss}(model, {name})" if fragments.loss else f"model(**{name}{task.forward_arguments}).loss"
    lines = _within(fragments.forward, [f"loss = {loss}"])
    lines += ["loss = loss * (count / total)"] if split else []
    lines += ["scaler.scale(loss).backward()" if fragments.scaler else "loss.backward()"]
    return _within(fragments.around_step, lines)


def _within(contexts: Sequence[str], lines: list[str]) -> list[str]:
    """The lines inside of all contexts, the first one outermost."""
    for context in reversed(contexts):
        lines = [f"with {context}:", *(f"    {line}" for line in lines)]
    return lines


def _update(fragments: Fragments) -> list[str]:
    if fragments.stepped_in_backward:
        return []
    scaled = ["scaler.step(optimizer)", "scaler.update()"]
    return [*(scaled if fragments.scaler else ["optimizer.step()"]), "optimizer.zero_grad()"]


def _step_arguments(fragments: Fragments) -> str:
    optimizer = [] if fragments.stepped_in_backward else ["optimizer"]
    return ", ".join(["model", *optimizer, "batch", *(["scaler"] if fragments.scaler else [])])


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
            "optimizer": _OPTIMIZER[fragments.stepped_in_backward],
            "scaler": [f"scaler = {fragments.scaler}"] if fragments.scaler else [],
            "sample_key": task.sample_key,
            "batch": task.batch,
            "step_arguments": _step_arguments(fragments),
            "units": per_step,
            "unit": task.unit,
            "save": [*(fragments.save or ("model.save_pretrained(args.output)",)), *keep],
        },
    )
