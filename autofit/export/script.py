"""train.py: a config as a stand-alone script, as one would write it by hand for just this model and
config.

It repeats what `training` does with the same config, in plain torch and the libraries behind the
techniques, without importing autofit. What a knob adds is in `knobs`, what a task adds in `tasks`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from typing import Any

from autofit.core.config import Config
from autofit.core.environment import EXPANDABLE
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.core.knobs import is_off
from autofit.core.layout import Layout
from autofit.core.learning_rates import default_learning_rate
from autofit.core.quoting import docstring, lines_of, python_string
from autofit.core.task import TEACHER, Task
from autofit.core.tasks import task_named
from autofit.export.fragments import Case, Fragments
from autofit.export.header import measured_sentence, script_header
from autofit.export.knobs import KNOBS
from autofit.export.knobs.parts import gradients_of_inputs, rounding, trained_parts
from autofit.export.knobs.reference import teacher
from autofit.export.packing import packed_samples, padded_samples
from autofit.export.script_step import (
    indented,
    kind_of_step,
    optimizer_lines,
    step_arguments,
    train_step,
    within,
)
from autofit.export.source import check_batch_sizes, nodes_of, torchrun
from autofit.export.template import WIDTH, call, fill, import_from, literal, packed, template
from autofit.export.unsaid import unsaid
from autofit.models.fake_quantised import FakeQuantisation
from autofit.models.huggingface import ASKS_INPUTS, PARTS, ROUNDS, SEES
from autofit.models.tasks import auto_class
from autofit.models.trained_parts import check_parts

_NOT_ARCHITECTURE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "auto_map",
    "id2label",
    "label2id",
    "model_type",
)
_STANDARD = (
    "import argparse",
    "import math",
    "import os",
    "from pathlib import Path",
    "from time import perf_counter",
)
_INSTEAD = "Run it with `autofit train`."
_NEVER_OFF = ("precision", "optimizer")  # null stands for an optimizer of the user's own
# What probes run under: with fixed segments the same config may not fit a card, and threads that
# spin while they wait make a busy machine many times slower.
_EARLY = {
    "cuda": (
        'if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # which would no longer count',
        '    os.environ.setdefault("PYTORCH_ALLOC_CONF", {allocator})  # as {origin}',
    ),
    "cpu": ('os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as {origin}; read by torch',),
}
_TOKENIZER = (
    'parser.add_argument("--tokenizer", '
    'help="name or directory; else beside the weights, else bytes")'
)
_TEACHER = 'parser.add_argument("--teacher", required=True, help="directory of the larger model")'
_TOLD = "print(f\"weights: {args.weights or 'random'}\")"
_NO_CACHE = "model.config.use_cache = False  # nothing is generated"
_PADDING = "{0}pad_token_id = {0}pad_token_id or 0  # where a text ends"
# Lines of `main` that compare data and model, before a wrong index fails the first step.
_KNOWN_TOKENS = (
    'if data["input_ids"].max() >= model.get_input_embeddings().num_embeddings:',
    '    raise SystemExit("the data has tokens that the model does not know: check --tokenizer")',
)
_KNOWN_CLASSES = (
    'if data["labels"].max() >= NUM_LABELS:',
    '    raise SystemExit("the data has more classes than the model: change NUM_LABELS")',
)
# what a step counts, in words of the script
_COUNTED = {
    "tokens": "EFFECTIVE_BATCH_SIZE * SEQUENCE_LENGTH",
    "samples": "EFFECTIVE_BATCH_SIZE",
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
    changes: Sequence[str] = (),
    predicted: Mapping[str, Any] | None = None,
    cuts: Sequence[int] = (),
) -> str | None:
    """The text of a train.py that runs `config` without autofit; None for a model that is not of
    transformers.

    Args:
        workload: Workload.summary().
        source: where the model came from.
        model_config: its config as transformers writes it, with `model_type`.
        measured: Measurement.to_measured(), for the header.
        versions: of the packages that it was measured with.
        hardware: where it was measured.
        changes: lines on what changing one knob did.
        predicted: Estimate.to_predicted(), where nothing was measured.
        cuts: the first block of each stage of a pipeline, and the number of all.

    Raises:
        InputError: the script cannot express the config, or its batch sizes contradict.
    """
    task = task_named(workload.get("task"))
    if not model_config or "model_type" not in model_config or source.get("kind") == "function":
        return None
    if not task.script.templates:
        return None

    task = _with_loss_options(task, source.get("loss_options") or {})
    apart = bool(workload.get("document_tokens"))
    packing = workload.get("packing")
    if packing is not None:
        script = padded_samples(task.script)
        if packing:
            script = packed_samples(task.script, apart=apart)
        task = replace(task, script=script)

    if what := _beyond_script(task, workload, source, model_config, config):
        raise InputError(f"train.py cannot be written for {what}.", _INSTEAD)

    if "text_config" in model_config:  # of more than text, also where it is trained on text alone
        names = model_config.get("architectures")
        if not isinstance(names, list):
            names = ()
        own = auto_class(task, str(model_config["model_type"]), names)
        task = replace(task, auto_classes=(own or task.auto_class,))

    # transformers counts the names in id2label, and takes 2 classes if there are none.
    classes = len(model_config.get("id2label") or ()) or int(model_config.get("num_labels") or 2)
    if task.scores:
        classes = 1
    what = str(model_config.get("problem_type") or "single_label_classification")
    if classes == 1:
        what = "regression"
    if task.classifies and what != "single_label_classification":
        raise InputError(f"train.py cannot be written for {what}: it reads class labels.", _INSTEAD)

    facts = hardware.to_dict() if isinstance(hardware, Hardware) else dict(hardware)
    device = str(facts["device"])
    length = workload.get("sequence_length")
    effective = workload["effective_batch_size"]
    layout = Layout.of(config)
    micro = config.micro_batch_size or effective // layout.dp_degree
    steps = config.gradient_accumulation_steps or effective // (micro * layout.dp_degree)
    check_batch_sizes(micro, steps, effective, layout)

    case = Case(
        config=config,
        task=task,
        device=device,
        micro_batch_size=micro,
        sequence_length=length,
        model_config=model_config,
        versions=versions,
        apart=apart,
        cuts=tuple(cuts),
        parts=check_parts(source.get(PARTS, ())),
        asks_inputs=source.get(ASKS_INPUTS) is True,
        rounds=FakeQuantisation.of_source(source.get(ROUNDS)),
    )
    knobs = rounding(case).joined(trained_parts(case)).joined(_fragments(case))
    knobs = knobs.joined(gradients_of_inputs(case))
    fragments = _of_loss(case).joined(knobs)

    several = layout.world > 1
    constants = [f'DEVICE = "{device}"']
    if task.of_texts:
        constants += [f"SEQUENCE_LENGTH = {length}  # tokens"]
    if task.has_new_head:
        constants += [f"NUM_LABELS = {classes}  # outputs"]
    constants += [f"EFFECTIVE_BATCH_SIZE = {effective}  # samples per optimizer step"]
    if steps > 1 or several:
        samples = f"samples at once; gradient_accumulation_steps: {steps}"
        constants += [f"MICRO_BATCH_SIZE = {micro}  # {samples}"]

    constants += ["WEIGHT_DECAY = 0.0", *fragments.constants]

    modules = [line.split()[1].partition(".")[0] for line in fragments.imports]
    packages = ["torch", "transformers", *(name.replace("_", "-") for name in modules)]
    packages += fragments.packages

    origin = "predicted" if predicted else "measured"
    title = f"Train {model} ({task.name}) as autofit {origin} it."
    head = script_header(
        measured_sentence(facts, measured, predicted, world=layout.world),
        versions,
        list(dict.fromkeys(packages)),
        changes,
        run=torchrun(layout, nodes_of(facts, layout)) if several else "python",
    )

    given = "required=True"
    if data := workload.get("data"):
        given = f"default=Path({python_string(str(data))})"
    flags = {
        "data_kind": task.script.data_kind,
        "tokenizer_argument": [_TOKENIZER] if task.of_texts else [],
        "teacher_argument": [_TEACHER] if TEACHER in task.frozen else [],
        "given": given,
        "lr": str(default_learning_rate(config)),
    }

    input_dtype = ""
    if fragments.input_dtype:
        input_dtype = f".to(torch.{fragments.input_dtype})"
    data_slots = {"input_dtype": input_dtype, **task.script.slots}
    readers = [fill(template(name), data_slots) for name in task.script.templates]
    batch_slots = {"mask_argument": task.script.mask_argument, "batch": task.script.batch}

    # Adapters are matrices, but for DoRA's lengths; beside them a new head alone is trained.
    vectors = not config.lora_rank or task.has_new_head or bool(config.lora_dora)
    made, optimizer = optimizer_lines(fragments, vectors=vectors)
    functions = [*fragments.functions, _build_model(task, fragments, case), *made]
    allocator = str(facts.get("allocator") or EXPANDABLE)
    kind = kind_of_step(task, layout, steps=steps)
    slots = {
        "title": docstring(textwrap.shorten(title, WIDTH - 6, placeholder=" ...")),
        "head": docstring(head),
        "imports": _imports(task, fragments, device, allocator, origin),
        "constants": constants,
        "flags": fill(template("flags"), flags),
        "architecture": _architecture(task, model_config, origin),
        "data": "\n\n".join(readers),
        "batches": fill(template("batches"), batch_slots),
        "functions": "\n\n".join(functions),
        "train_step": train_step(task, fragments, kind),
        "main": _main(task, fragments, optimizer),
    }

    return fill(template("train"), slots)


def _beyond_script(
    task: Task,
    workload: Mapping[str, Any],
    source: Mapping[str, Any],
    model_config: Mapping[str, Any],
    config: Config,
) -> str | None:
    """What of a training no script does, in words; None where nothing is in the way."""
    if Layout.of(config).world > 1 and task.script.loss:
        return f"{task.name} on several devices"
    if Layout.of(config).pipeline > 1 and workload.get("packing") is not None:
        return "samples of several lengths in the stages of a pipeline"
    if workload.get("packing") is False and config.precision == "fp8":
        return "padded samples in fp8: it fills up no rows"
    if source.get(SEES):
        return f"{task.name} about images"
    if what := unsaid(source):
        return what
    if task.script.replays and workload.get("own_loss"):
        return f"the loss of {task.name} in each micro-batch by itself"
    if model_config.get("quantization_config"):
        return "a checkpoint that is quantised already"

    return None


def _fragments(case: Case) -> Fragments:
    """What all knobs add, together.

    Raises:
        InputError: a knob or its value has no lines here.
    """
    config = case.config
    together = Fragments()
    for name in dict.fromkeys((*KNOBS, *config)):
        if name not in _NEVER_OFF and is_off(config.get(name)):
            continue

        added = KNOBS[name](case) if name in KNOBS else None
        if added is None:
            raise InputError(f"train.py cannot express {name} {config[name]}.", _INSTEAD)
        together = together.joined(added)

    return together


def _of_loss(case: Case) -> Fragments:
    """The loss of a task whose models do not compute it."""
    script = case.task.script
    if not script.loss:
        return Fragments()

    slots = {"micro": str(case.micro_batch_size)}
    return Fragments(
        imports=script.loss_imports,
        constants=script.constants,
        functions=tuple(fill(template(name), slots) for name in script.loss_templates),
        loss=script.loss,
    ).joined(teacher(case))


def _with_loss_options(task: Task, options: Mapping[str, Any]) -> Task:
    """The task whose script has constants of other values.

    Raises:
        InputError: the script has no such constant.
    """
    constants = {line.partition(" =")[0].lower(): line for line in task.script.constants}
    for name, value in options.items():
        if name not in constants:
            message = f"train.py cannot be written for {task.name} with {name}={value}."
            raise InputError(message, "autofit train trains it.")

        start, mark, comment = constants[name].partition("  #")
        constants[name] = f"{start.partition(' =')[0]} = {value!r}{mark}{comment}"

    script = replace(task.script, constants=tuple(constants.values()))
    return replace(task, script=script)


def _imports(
    task: Task,
    fragments: Fragments,
    device: str,
    allocator: str,
    origin: str,
) -> list[str]:
    """The standard library, what has to be set before torch is imported, and the libraries."""

    def order(line: str) -> tuple[bool, str]:
        return line.startswith("from "), line

    standard = {*_STANDARD, *fragments.standard}
    classes = ["AutoConfig", task.auto_class]
    if task.of_texts:
        standard.add("import json")
        classes += ["AutoTokenizer"]

    asks_quantised = any("BitsAndBytesConfig" in line for line in fragments.companions)
    if fragments.quantization or asks_quantised:
        classes += ["BitsAndBytesConfig"]

    library = {*task.script.imports, *fragments.imports}
    library |= {"import torch", import_from("transformers", *classes)}
    words = {"allocator": python_string(allocator), "origin": origin}
    early = [line.format(**words) for line in _EARLY[device]]

    return [
        *sorted(standard, key=order),
        "",
        *early,
        "",
        *sorted(library, key=order),
    ]


def _architecture(task: Task, model_config: Mapping[str, Any], origin: str) -> list[str]:
    """The call that makes the model's config; the number of classes is a constant."""
    arguments = [literal(model_config["model_type"])]
    left_out = list(_NOT_ARCHITECTURE)
    if task.has_new_head:
        arguments += ["num_labels=NUM_LABELS"]
        left_out += ["num_labels"]

    unnamed = {}
    for name, value in model_config.items():
        if name in left_out:
            continue
        if _is_argument(name):
            arguments += [f"{name}={literal(value, 0, len(name) + 6)}"]
        else:
            unnamed[name] = value

    if unnamed:
        arguments += [f"**{literal(unnamed, 0, 7)}"]
    arguments.sort(key=lambda argument: "\n" in argument)  # long ones last

    lines = []
    for row in packed(arguments, WIDTH - 4):
        lines += indented(lines_of(row))
    return [
        f"ARCHITECTURE = AutoConfig.for_model(  # as {origin}; --weights bring their own",
        *lines,
        ")",
    ]


def _is_argument(name: str) -> bool:
    """Whether a call can name it: Python takes some letters beyond ASCII for one another."""
    return name.isascii() and name.isidentifier() and not iskeyword(name)


def _build_model(task: Task, fragments: Fragments, case: Case) -> str:
    """The function that makes the model, at random or from a directory of weights."""
    is_quantized = bool(fragments.quantization)
    made = f"{task.auto_class}.from_config(ARCHITECTURE)"
    if is_quantized:
        name = "build_quantized"
        given = ["weights or folder", "quantization_config=bnb", "device_map=DEVICE"]
        made = f"{made}.save_pretrained(folder)"
    else:
        name = "build_model"
        given = ["weights"]
        made = f"model = {made}"

    if task.has_new_head:
        given += ["num_labels=NUM_LABELS", "ignore_mismatched_sizes=True"]
    dtype = fragments.load_dtype
    if fragments.place and not is_quantized:
        # that of the checkpoint, which need not be widened first, to be narrowed again
        dtype = '"auto"'

    given += [f"dtype={dtype}"]

    adapt = [*fragments.adapt, *fragments.place, *fragments.shard]
    random_weights = [made]
    if task.pools_texts:
        adapt = [_NO_CACHE, _PADDING.format("model.config."), *adapt]
        random_weights = [_PADDING.format("ARCHITECTURE."), made]

    slots = {
        "held": fragments.held or "",
        "place": "the host, to be divided" if case.is_divided else "its device",
        "moved": "" if case.is_divided else ".to(DEVICE)",
        "adapt": adapt,
        "random_weights": random_weights,
        "load_weights": call(f"model = {task.auto_class}.from_pretrained", given, indent=8),
        "quantized": str(fragments.quantized),
        "quantization": call("bnb = BitsAndBytesConfig", fragments.quantization, indent=4),
    }

    return fill(template(name), slots)


def _main(task: Task, fragments: Fragments, optimizer: Sequence[str]) -> str:
    """The function that trains and saves."""
    save = list(fragments.save or ("model.save_pretrained(args.output)",))
    checks: list[str] = []
    if task.of_texts:
        save += ["if tokenizer:", "    tokenizer.save_pretrained(args.output)"]
        checks += _KNOWN_TOKENS

    if task.classifies:
        checks += _KNOWN_CLASSES

    if fragments.spread:
        save = [*fragments.gather, "if rank == 0:", *indented(save)]

    slots = {
        "data_kind": task.script.data_kind,
        "data_arguments": "args.data, tokenizer" if task.of_texts else "args.data",
        "start": fragments.start,
        "tokenizer": template("tokenizer") if task.of_texts else _TOLD,
        "mask_id": template("mask_id") if task.script.mask_argument else "",
        "model": [
            *fragments.companions,
            "model = build_model(args.weights)",
            *checks,
            *within(fragments.forward, list(fragments.asked_first)),
            *fragments.spread,
        ],
        "optimizer": optimizer,
        "scaler": [f"scaler = {fragments.scaler}"] if fragments.scaler else [],
        "mask": task.script.mask_argument,
        "step_arguments": step_arguments(fragments),
        "counted": _COUNTED[task.script.unit],
        "unit": task.script.unit,
        "save": save,
        "end": ["dist.destroy_process_group()"] if fragments.spread else [],
    }

    return fill(template("main"), slots)
