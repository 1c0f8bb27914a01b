"""train.py: the found config as a stand-alone script, as one would write it by hand for just this model and config.

It repeats what `training` does with the same config, in plain torch and the libraries behind the techniques; the names
of autofit's own code stay out of it. What a knob adds is in `knobs`, what a task adds in `tasks`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from autofit.core.config import Config
from autofit.core.environment import EXPANDABLE
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.core.knobs import is_off
from autofit.export.fragments import Case, Fragments
from autofit.export.head import head
from autofit.export.knobs import KNOBS
from autofit.export.tasks import TASKS, Task, checks, random_model, tokenizer
from autofit.export.template import WIDTH, call, fill, import_from, literal, packed, plain, template

_NOT_ARCHITECTURE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "auto_map",
    "id2label",
    "label2id",
)
_MODULES = ("argparse", "math", "os")
_STANDARD = (*(f"import {name}" for name in _MODULES), "from pathlib import Path", "from time import perf_counter")
_ARCHITECTURE = "ARCHITECTURE = AutoConfig.for_model(  # as measured; --weights bring their own"
_INSTEAD = "Run it with `autofit train`."
# What probes run under: with fixed segments the same config may not fit a card, and threads that spin while they wait
# make a busy machine many times slower.
_EARLY = {
    "cuda": (
        'if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # which would no longer count',
        '    os.environ.setdefault("PYTORCH_ALLOC_CONF", {allocator})  # as measured',
    ),
    "cpu": ('os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as measured; read by torch',),
}

_OPTIMIZER = {False: "optimizer = build_optimizer(model, args.lr)", True: "step_in_backward(model, args.lr)"}
_SPLIT = "samples at once; gradient_accumulation_steps"
_COUNTED = {  # in a step
    "tokens": "EFFECTIVE_BATCH_SIZE * SEQUENCE_LENGTH",
    "samples": "EFFECTIVE_BATCH_SIZE",
}
_MATRICES = (
    'matrices = {"params": [p for p in trained if p.dim() >= 2], "weight_decay": WEIGHT_DECAY}',
    'others = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}',
)
_OWN = '"auto"'  # the format that a checkpoint is written in


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
    changes: Sequence[str] = (),
    predicted: Mapping[str, Any] | None = None,
) -> str | None:
    """The text of a train.py that runs `config` without autofit; None for a model that is not of transformers.

    Args:
        workload: Workload.summary(); `source`: where the model came from; `model_config`: its config as transformers
            writes it, with `model_type`.
        measured: Measurement.to_measured(), for the head comment; `changes`: lines on what one knob alone did;
            `predicted`: Estimate.to_predicted(), where nothing was measured.

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
    title = f"Train {plain(model)} ({workload['task']}) as autofit {'predicted' if predicted else 'measured'} it."
    masks = ", mask_id" if task.masks else ""
    constants = _constants(task, batch, device, length, classes=_classes(model_config))
    slots = {
        "title": textwrap.shorten(title, WIDTH - 6, placeholder=" ..."),
        "head": head(
            facts, measured=measured, predicted=predicted, versions=versions, packages=packages, changes=changes
        ),
        "imports": _imports(task, fragments, facts),
        "constants": [*constants, *fragments.constants],
        "flags": _flags(task),
        "architecture": _architecture(task, model_config),
        "data": "\n\n".join(fill(template(name), _reading(fragments)) for name in task.data),
        "batches": fill(template("batches"), {"mask_argument": masks, "batch": task.batch}),
        "build_model": "\n\n".join([*fragments.functions, _build_model(task, fragments)]),
        # Adapters are matrices; beside them only a classifier's head is trained.
        "build_optimizer": _build_optimizer(fragments, vectors=not config.get("lora_rank") or task.classes),
        "train_step": _train_step(task, fragments, batch),
    }
    text = fill(template("train"), {**slots, "main": _main(task, fragments, masks)})
    return text.replace("# as measured", "# as predicted") if predicted else text


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
    def steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.effective // self.micro

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


def _imports(task: Task, fragments: Fragments, facts: Mapping[str, Any]) -> list[str]:
    standard = sorted({*_STANDARD, *fragments.standard, *(["import json"] if task.text else [])}, key=_place)
    classes = ["AutoConfig", task.auto_class]
    classes += ["AutoTokenizer"] if task.text else []
    classes += ["BitsAndBytesConfig"] if fragments.quantization else []
    library = {*task.imports, *fragments.imports, "import torch", import_from("transformers", *classes)}
    allocator = facts.get("allocator") or EXPANDABLE
    early = [line.format(allocator=literal(str(allocator))) for line in _EARLY[str(facts["device"])]]
    return [*standard, "", *early, "", *sorted(library, key=_place)]


def _place(line: str) -> tuple[bool, str]:
    """Plain imports before the others, each kind by the alphabet."""
    return line.startswith("from "), line


def _constants(task: Task, batch: _Batch, device: str, sequence_length: int | None, *, classes: int) -> list[str]:
    """What one may want to edit, but for what knobs add to it, and for what has a flag."""
    return [
        f'DEVICE = "{device}"',
        *([f"SEQUENCE_LENGTH = {sequence_length}  # tokens"] if task.text else []),
        *([f"NUM_LABELS = {classes}  # classes"] if task.classes else []),
        f"EFFECTIVE_BATCH_SIZE = {batch.effective}  # samples per optimizer step",
        *([f"MICRO_BATCH_SIZE = {batch.micro}  # {_SPLIT}: {batch.steps}"] if batch.split else []),
        "WEIGHT_DECAY = 0.0",
    ]


def _flags(task: Task) -> str:
    named = 'parser.add_argument("--tokenizer", help="name or directory; else beside the weights, else bytes")'
    slots = {"data_kind": task.data_kind, "tokenizer_argument": [named] if task.text else []}
    return fill(template("flags"), slots)


def _reading(fragments: Fragments) -> dict[str, str]:
    return {"input_dtype": f".to(torch.{fragments.input_dtype})" if fragments.input_dtype else ""}


def _architecture(task: Task, model_config: Mapping[str, Any]) -> list[str]:
    """A call with what says something about the architecture; the number of classes is a constant."""
    left_out = (*_NOT_ARCHITECTURE, "model_type", *(("num_labels",) if task.classes else ()))
    kept = {name: value for name, value in model_config.items() if name not in left_out}
    named = {name: kept.pop(name) for name in list(kept) if name.isidentifier() and not iskeyword(name)}
    arguments = [
        literal(model_config["model_type"]),
        *(["num_labels=NUM_LABELS"] if task.classes else []),
        *(f"{name}={literal(value, 0, len(name) + 6)}" for name, value in named.items()),
        *([f"**{literal(kept, 0, 7)}"] if kept else []),
    ]
    lines = packed(arguments, WIDTH - 4)
    return [_ARCHITECTURE, *(f"    {line}" for each in lines for line in each.splitlines()), ")"]


def _classes(model_config: Mapping[str, Any]) -> int:
    """Outputs of a classifier: transformers counts the names in id2label, and takes 2 where there are none."""
    return len(model_config.get("id2label") or ()) or int(model_config.get("num_labels") or 2)


def _build_model(task: Task, fragments: Fragments) -> str:
    given = [
        *(["num_labels=NUM_LABELS", "ignore_mismatched_sizes=True"] if task.classes else []),
        # A checkpoint in a lower format need not be widened first, to be narrowed again.
        f"dtype={fragments.load_dtype if fragments.quantization or not fragments.place else _OWN}",
    ]
    slots = {
        "held": fragments.held or "",
        "adapt": [*task.configure, *fragments.adapt, *fragments.place],
    }
    if fragments.quantization:
        given = ["weights or folder", "quantization_config=bnb", "device_map=DEVICE", *given]
        slots["random_weights"] = random_model(task, "{}.save_pretrained(folder)")
        slots["load_weights"] = call(f"model = {task.auto_class}.from_pretrained", given, indent=8)
        slots["quantized"] = str(fragments.quantized)
        slots["quantization"] = call("bnb = BitsAndBytesConfig", fragments.quantization, indent=4)
        return fill(template("build_quantized"), slots)
    slots["random_weights"] = random_model(task, "model = {}")
    slots["load_weights"] = call(f"model = {task.auto_class}.from_pretrained", ["weights", *given], indent=8)
    return fill(template("build_model"), slots)


def _build_optimizer(fragments: Fragments, *, vectors: bool) -> str:
    """The optimizer; `vectors` are trained too, which are not decayed."""
    assert fragments.optimizer, "the optimizer's row always makes one"
    knobs, made = str(fragments.comment), fragments.optimizer
    if fragments.stepped_in_backward:
        made = made.format(groups="groups", decay="")
        return fill(template("step_in_backward"), {"knobs": knobs, "optimizer_call": made})
    groups, decay = ("[matrices, others]", "") if vectors else ("trained", ", weight_decay=WEIGHT_DECAY")
    slots = {"groups": _MATRICES if vectors else (), "optimizer_call": made.format(groups=groups, decay=decay)}
    which = "matrices alone" if vectors else "the adapters"
    return fill(template("build_optimizer"), {"knobs": f"{knobs}; weight decay on {which}", **slots})


def _train_step(task: Task, fragments: Fragments, batch: _Batch) -> str:
    name = "micro" if batch.split else "batch"
    return fill(
        template("step_split" if batch.split else "step_whole"),
        {
            "step_arguments": _step_arguments(fragments),
            "valid": task.valid,
            "compute": _computation(name, task, fragments, split=batch.split),
            "update": _update(fragments),
        },
    )


def _computation(name: str, task: Task, fragments: Fragments, *, split: bool) -> list[str]:
    """Forward and backward of a batch, in the contexts that surround them."""
    loss = f"{fragments.loss}(model, {name})" if fragments.loss else f"model(**{name}{task.forward_arguments}).loss"
    lines = _within(fragments.forward, [f"loss = share * {loss}" if split else f"loss = {loss}"])
    lines += ["scaler.scale(loss).backward()" if fragments.scaler else "loss.backward()"]
    return _within(fragments.around_step, lines)


def _within(contexts: Sequence[str], lines: list[str]) -> list[str]:
    """The lines inside of all contexts, the first one outermost; a comment stays behind the colon."""
    for context in reversed(contexts):
        code, mark, comment = context.partition("  # ")
        lines = [f"with {code}:{mark}{comment}", *(f"    {line}" for line in lines)]
    return lines


def _update(fragments: Fragments) -> list[str]:
    if fragments.stepped_in_backward:
        return []
    scaled = ["scaler.step(optimizer)", "scaler.update()"]
    return [*(scaled if fragments.scaler else ["optimizer.step()"]), "optimizer.zero_grad()"]


def _step_arguments(fragments: Fragments) -> str:
    optimizer = [] if fragments.stepped_in_backward else ["optimizer"]
    return ", ".join(["model", *optimizer, "batch", *(["scaler"] if fragments.scaler else [])])


def _main(task: Task, fragments: Fragments, masks: str) -> str:
    keep = ("if tokenizer:", "    tokenizer.save_pretrained(args.output)") if task.text else ()
    return fill(
        template("main"),
        {
            "data_kind": task.data_kind,
            "data_arguments": "args.data, tokenizer" if task.text else "args.data",
            "start": fragments.start,
            "tokenizer": tokenizer(task),
            "model": ["model = build_model(args.weights)", *checks(task)],
            "optimizer": _OPTIMIZER[fragments.stepped_in_backward],
            "scaler": [f"scaler = {fragments.scaler}"] if fragments.scaler else [],
            "mask": masks,
            "step_arguments": _step_arguments(fragments),
            "counted": _COUNTED[task.unit],
            "unit": task.unit,
            "save": [*(fragments.save or ("model.save_pretrained(args.output)",)), *keep],
        },
    )
