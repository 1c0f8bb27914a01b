"""train.py: a config as a stand-alone script, as one would write it by hand for just this model and config.

It repeats what `training` does with the same config, in plain torch and the libraries behind the techniques, without
importing autofit. What a knob adds is in `knobs`, what a task adds in `tasks`.
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
from autofit.export.source import check_batch_sizes, nodes_of, torchrun
from autofit.export.template import WIDTH, call, fill, import_from, literal, packed, template
from autofit.export.unsaid import unsaid
from autofit.models.fake_quantised import FakeQuantisation
from autofit.models.huggingface import ASKS_INPUTS, PARTS, ROUNDS, SEES
from autofit.models.tasks import auto_class
from autofit.models.trained_parts import check_parts

_NOT_ARCHITECTURE = (
    *(
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "auto_map",
        "id2label",
        "label2id",
    ),
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
_LONG = 80  # a context and its comment, which are indented by up to three levels
_NEVER_OFF = ("precision", "optimizer")  # null stands for an optimizer of the user's own
# What probes run under: with fixed segments the same config may not fit a card, and threads that spin while they wait
# make a busy machine many times slower.
_EARLY = {
    "cuda": (
        'if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # which would no longer count',
        '    os.environ.setdefault("PYTORCH_ALLOC_CONF", {allocator})  # as {origin}',
    ),
    "cpu": ('os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as {origin}; read by torch',),
}
_TOKENIZER = 'parser.add_argument("--tokenizer", help="name or directory; else beside the weights, else bytes")'
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
# in a step
_COUNTED = {"tokens": "EFFECTIVE_BATCH_SIZE * SEQUENCE_LENGTH", "samples": "EFFECTIVE_BATCH_SIZE"}
_MATRICES = (
    'matrices = {"params": [p for p in trained if p.dim() >= 2], "weight_decay": WEIGHT_DECAY}',
    'others = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}',
)


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
        measured: Measurement.to_measured(), for the header; `changes`: lines on what changing one knob did;
            `predicted`: Estimate.to_predicted(), where nothing was measured.

    Raises:
        InputError: the script cannot express the config, or its batch sizes contradict.
    """
    task = task_named(workload.get("task"))
    if not model_config or "model_type" not in model_config or source.get("kind") == "function":
        return None
    if not task.script.templates:
        return None

    task = _with_loss_options(task, source.get("loss_options") or {})
    packing = workload.get("packing")
    apart = bool(workload.get("document_tokens"))
    if packing is not None:
        script = (
            packed_samples(task.script, apart=apart) if packing else padded_samples(task.script)
        )
        task = replace(task, script=script)
    if Layout.of(config).world > 1 and task.script.loss:
        raise InputError(
            f"train.py cannot be written for {task.name} on several devices.", _INSTEAD
        )
    if packing is False and config.precision == "fp8":
        raise InputError(
            "train.py cannot be written for padded samples in fp8: it fills up no rows.", _INSTEAD
        )
    if source.get(SEES):
        raise InputError(f"train.py cannot be written for {task.name} about images.", _INSTEAD)
    if what := unsaid(source):
        raise InputError(f"train.py cannot be written for {what}.", _INSTEAD)
    if task.script.replays and workload.get("own_loss"):
        what = f"the loss of {task.name} in each micro-batch by itself"
        raise InputError(f"train.py cannot be written for {what}.", _INSTEAD)
    if model_config.get("quantization_config"):
        raise InputError(
            "train.py cannot be written for a checkpoint that is quantised already.", _INSTEAD
        )
    if "text_config" in model_config:  # of more than text, also where it is trained on text alone
        names = model_config.get("architectures")
        own = auto_class(
            task, str(model_config["model_type"]), names if isinstance(names, list) else ()
        )
        task = replace(task, auto_classes=(own or task.auto_class,))
    # transformers counts the names in id2label, and takes 2 classes if there are none.
    classes = len(model_config.get("id2label") or ()) or int(model_config.get("num_labels") or 2)
    kind = model_config.get("problem_type") or "single_label_classification"
    classes = 1 if task.scores else classes
    if task.classifies and (kind != "single_label_classification" or classes == 1):
        what = "regression" if classes == 1 else str(kind)
        raise InputError(f"train.py cannot be written for {what}: it reads class labels.", _INSTEAD)
    facts = hardware.to_dict() if isinstance(hardware, Hardware) else dict(hardware)
    device, length, effective = (
        str(facts["device"]),
        workload.get("sequence_length"),
        workload["effective_batch_size"],
    )
    layout = Layout.of(config)
    micro = config.micro_batch_size or effective // layout.dp_degree
    steps = config.gradient_accumulation_steps or effective // (micro * layout.dp_degree)
    check_batch_sizes(micro, steps, effective, layout)
    case = Case(
        config,
        task,
        device,
        micro,
        length,
        model_config,
        versions,
        apart,
        check_parts(source.get(PARTS, ())),
        source.get(ASKS_INPUTS) is True,
        FakeQuantisation.of_source(source.get(ROUNDS)),
    )
    fragments = rounding(case).joined(trained_parts(case)).joined(_fragments(case))
    fragments = fragments.joined(gradients_of_inputs(case))
    fragments, several = _of_loss(case).joined(fragments), layout.world > 1
    imported = [line.split()[1].partition(".")[0].replace("_", "-") for line in fragments.imports]
    packages = list(dict.fromkeys(["torch", "transformers", *imported, *fragments.packages]))
    origin = "predicted" if predicted else "measured"
    title = f"Train {model} ({task.name}) as autofit {origin} it."
    constants = [
        f'DEVICE = "{device}"',
        *([f"SEQUENCE_LENGTH = {length}  # tokens"] if task.of_texts else []),
        *([f"NUM_LABELS = {classes}  # outputs"] if task.has_new_head else []),
        f"EFFECTIVE_BATCH_SIZE = {effective}  # samples per optimizer step",
        *(
            [f"MICRO_BATCH_SIZE = {micro}  # samples at once; gradient_accumulation_steps: {steps}"]
            * (steps > 1 or several)
        ),
        "WEIGHT_DECAY = 0.0",
    ]
    input_dtype = f".to(torch.{fragments.input_dtype})" if fragments.input_dtype else ""
    # Adapters are matrices, but for DoRA's lengths; beside them only a classifier's head is trained.
    vectors = not config.lora_rank or task.has_new_head or bool(config.lora_dora)
    made, optimizer = _optimizer(fragments, vectors=vectors)
    data = workload.get("data")
    given = f"default=Path({python_string(str(data))})" if data else "required=True"
    tokenizer = [_TOKENIZER] if task.of_texts else []
    flags = {
        "data_kind": task.script.data_kind,
        "tokenizer_argument": tokenizer,
        "teacher_argument": [_TEACHER] if TEACHER in task.frozen else [],
        "given": given,
        "lr": str(default_learning_rate(config)),
    }
    slots = {
        "title": docstring(textwrap.shorten(title, WIDTH - 6, placeholder=" ...")),
        "head": docstring(
            script_header(
                measured_sentence(facts, measured, predicted, world=layout.world),
                *(versions, packages, changes),
                run=torchrun(layout, nodes_of(facts, layout)) if several else "python",
            )
        ),
        "imports": _imports(
            task, fragments, device, str(facts.get("allocator") or EXPANDABLE), origin
        ),
        "constants": [*constants, *fragments.constants],
        "flags": fill(template("flags"), flags),
        "architecture": _architecture(task, model_config, origin),
        "data": "\n\n".join(
            fill(template(name), {"input_dtype": input_dtype, **task.script.slots})
            for name in task.script.templates
        ),
        "batches": fill(
            template("batches"),
            {"mask_argument": task.script.mask_argument, "batch": task.script.batch},
        ),
        "functions": "\n\n".join(
            [*fragments.functions, _build_model(task, fragments, case), *made]
        ),
        "train_step": _train_step(
            task, fragments, _kind_of_step(task, several=several, steps=steps)
        ),
        "main": _main(task, fragments, optimizer),
    }
    return fill(template("train"), slots)


def _fragments(case: Case) -> Fragments:
    """What all knobs add, together; raises InputError for a knob or value that has no lines here."""
    together, config = Fragments(), case.config
    for name in (*KNOBS, *(name for name in config if name not in KNOBS)):
        if name in _NEVER_OFF or not is_off(config.get(name)):
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
        start, _, comment = constants[name].partition("  #")
        start = f"{start.partition(' =')[0]} = {value!r}"
        constants[name] = f"{start}  #{comment}" if comment else start
    script = replace(task.script, constants=tuple(constants.values()))
    return replace(task, script=script)


def _imports(
    task: Task, fragments: Fragments, device: str, allocator: str, origin: str
) -> list[str]:
    def order(line: str) -> tuple[bool, str]:
        return line.startswith("from "), line

    classes = ["AutoConfig", task.auto_class, *(["AutoTokenizer"] if task.of_texts else [])]
    asks_quantised = any("BitsAndBytesConfig" in line for line in fragments.companions)
    classes += ["BitsAndBytesConfig"] if fragments.quantization or asks_quantised else []
    standard = {*_STANDARD, *fragments.standard, *(["import json"] if task.of_texts else [])}
    library = {
        *task.script.imports,
        *fragments.imports,
        "import torch",
        import_from("transformers", *classes),
    }
    early = [
        line.format(allocator=python_string(allocator), origin=origin) for line in _EARLY[device]
    ]
    return [*sorted(standard, key=order), "", *early, "", *sorted(library, key=order)]


def _architecture(task: Task, model_config: Mapping[str, Any], origin: str) -> list[str]:
    """The call that makes the model's config; the number of classes is a constant."""
    left_out = (*_NOT_ARCHITECTURE, *(("num_labels",) if task.has_new_head else ()))
    values = {name: value for name, value in model_config.items() if name not in left_out}
    named = {name: values.pop(name) for name in list(values) if _is_argument(name)}
    arguments = [
        literal(model_config["model_type"]),
        *(["num_labels=NUM_LABELS"] if task.has_new_head else []),
        *(f"{name}={literal(value, 0, len(name) + 6)}" for name, value in named.items()),
        *([f"**{literal(values, 0, 7)}"] if values else []),
    ]
    arguments.sort(key=lambda argument: "\n" in argument)  # long ones last
    lines = [f"    {line}" for each in packed(arguments, WIDTH - 4) for line in lines_of(each)]
    return [
        f"ARCHITECTURE = AutoConfig.for_model(  # as {origin}; --weights bring their own",
        *lines,
        ")",
    ]


def _is_argument(name: str) -> bool:
    """Whether a call can name it: Python takes some letters beyond ASCII for one another."""
    return name.isascii() and name.isidentifier() and not iskeyword(name)


def _build_model(task: Task, fragments: Fragments, case: Case) -> str:
    quantized = bool(fragments.quantization)
    # "auto" is the dtype of the checkpoint, which need not be widened first, to be narrowed again.
    dtype = fragments.load_dtype if quantized or not fragments.place else '"auto"'
    given = [
        *(["num_labels=NUM_LABELS", "ignore_mismatched_sizes=True"] if task.has_new_head else []),
        f"dtype={dtype}",
    ]
    made = f"{task.auto_class}.from_config(ARCHITECTURE)"
    configure, padding = [], []
    if task.pools_texts:
        configure = [_NO_CACHE, _PADDING.format("model.config.")]
        padding = [_PADDING.format("ARCHITECTURE.")]
    first = (
        ["weights or folder", "quantization_config=bnb", "device_map=DEVICE"]
        if quantized
        else ["weights"]
    )
    slots = {
        "held": fragments.held or "",
        "place": "the host, to be divided" if case.shards else "its device",
        "moved": "" if case.shards else ".to(DEVICE)",
        "adapt": [*configure, *fragments.adapt, *fragments.place, *fragments.shard],
        "random_weights": [
            *padding,
            f"{made}.save_pretrained(folder)" if quantized else f"model = {made}",
        ],
        "load_weights": call(
            f"model = {task.auto_class}.from_pretrained", [*first, *given], indent=8
        ),
        "quantized": str(fragments.quantized),
        "quantization": call("bnb = BitsAndBytesConfig", fragments.quantization, indent=4),
    }
    return fill(template("build_quantized" if quantized else "build_model"), slots)


def _optimizer(fragments: Fragments, *, vectors: bool) -> tuple[list[str], list[str]]:
    """A function that makes the optimizer, and the lines that call it; or lines alone, in a script of several devices.
    `vectors` are trained too, without weight decay."""
    assert fragments.optimizer, "the optimizer's row always makes one"
    knobs = str(fragments.comment)
    if fragments.stepped_in_backward:
        made = fragments.optimizer.format(groups="groups", lr="lr", decay="")
        function = fill(template("step_in_backward"), {"knobs": knobs, "optimizer_call": made})
        return [function], ["step_in_backward(model, args.lr)"]
    groups, decay = (
        ("[matrices, others]", "") if vectors else ("trained", ", weight_decay=WEIGHT_DECAY")
    )
    trained = "trained = [p for p in model.parameters() if p.requires_grad]"
    rest = [*fragments.stepped_parts, *(_MATRICES if vectors else ())]
    if fragments.faster:
        rate = "args.lr" if fragments.spread else "lr"
        trained = 'faster = [p for name, p in model.named_parameters() if "lora_B" in name]'
        others = 'others = [p for n, p in model.named_parameters() if p.requires_grad and "lora_B" not in n]'
        groups, rest = "groups", [others, f"ratio = {fragments.faster}"]
        rest += [f'groups = [{{"params": others}}, {{"params": faster, "lr": ratio * {rate}}}]']
    if fragments.spread:
        lines = [f"{trained}  # {knobs}", *rest]
        return [], [
            *lines,
            f"optimizer = {fragments.optimizer.format(groups=groups, lr='args.lr', decay=decay)}",
        ]
    slots = {
        "knobs": f"{knobs}; weight decay on {'matrices alone' if vectors else 'the adapters'}",
        "lines": [trained, *rest],
        "optimizer_call": fragments.optimizer.format(groups=groups, lr="lr", decay=decay),
    }
    return [fill(template("build_optimizer"), slots)], [
        "optimizer = build_optimizer(model, args.lr)"
    ]


def _kind_of_step(task: Task, *, several: bool, steps: int) -> str:
    """Which of the templates `step_*` it is."""
    if several:
        return "ranks"
    if steps == 1:
        return "whole"
    return "replayed" if task.script.replays else "split"


def _train_step(task: Task, fragments: Fragments, kind: str) -> str:
    """The function of one of the templates `step_*`."""
    name = "batch" if kind == "whole" else "micro"
    loss = (
        f"{fragments.loss}(model, {name})"
        if fragments.loss
        else f"model(**{name}{task.script.forward_arguments}).loss"
    )
    averaged = kind == "ranks"
    if averaged and fragments.loss:
        loss = f"model({name})"
    by_mean = averaged and not fragments.loss  # which is no number over nothing
    lines = _within(
        fragments.forward,
        [f"loss = {loss}" if kind == "whole" or by_mean else f"loss = share * {loss}"],
    )
    if by_mean:  # every process takes part in every forward, also where its samples count nothing
        lines += ["loss = loss * share if share else loss.nan_to_num() * 0"]
    weighted = "DEVICES * loss" if averaged else "loss"
    comment = "  # gradients are averaged over the devices" if averaged else ""
    backward = (
        f"scaler.scale({weighted})" if fragments.scaler else f"({weighted})" if averaged else "loss"
    )
    lines += [f"{backward}.backward(){comment}"]
    first: list[str] = []
    if kind == "replayed":
        asked = "represent(model, micro)"
        first = _within(["torch.no_grad()", *fragments.forward], [f"vectors.append({asked})"])
        lines = _within(fragments.forward, [f"loss = ({asked} * slopes[part]).sum()"])
        lines += [f"{backward}.backward()"]
    steps = (
        ["scaler.step(optimizer)", "scaler.update()"] if fragments.scaler else ["optimizer.step()"]
    )
    slots = {
        "step_arguments": _step_arguments(fragments),
        "micro": fragments.micro,
        "valid": task.script.valid,
        "first": first,
        "before": _within(fragments.forward, list(task.script.before_step)),
        "compute": _within(fragments.around_step, lines),
        "update": [] if fragments.stepped_in_backward else [*steps, _zero(fragments)],
    }
    return fill(template(f"step_{kind}"), slots)


def _zero(fragments: Fragments) -> str:
    """What frees gradients: where an optimizer steps parts of weights, those of whole ones are the model's."""
    return "model.zero_grad()" if fragments.stepped_parts else "optimizer.zero_grad()"


def _within(contexts: Sequence[str], lines: list[str]) -> list[str]:
    """The lines inside all contexts, the first one outermost; a comment stays behind the colon, or above a long one."""
    for context in reversed(contexts) if lines else ():
        code, mark, comment = context.partition("  # ")
        is_long = len(context) > _LONG
        above = [f"# {comment}"] if is_long else []
        lines = [
            *above,
            f"with {code}:" if is_long else f"with {code}:{mark}{comment}",
            *_indented(lines),
        ]
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _step_arguments(fragments: Fragments) -> str:
    optimizer = [] if fragments.stepped_in_backward else ["optimizer"]
    return ", ".join(["model", *optimizer, "batch", *(["scaler"] if fragments.scaler else [])])


def _main(task: Task, fragments: Fragments, optimizer: Sequence[str]) -> str:
    save = [*(fragments.save or ("model.save_pretrained(args.output)",))]
    checks: list[str] = []
    if task.of_texts:
        save += ["if tokenizer:", "    tokenizer.save_pretrained(args.output)"]
        checks += _KNOWN_TOKENS
    if task.classifies:
        checks += _KNOWN_CLASSES
    if fragments.spread:
        save = [*fragments.gather, "if rank == 0:", *_indented(save)]
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
            *_within(fragments.forward, list(fragments.asked_first)),
            *fragments.spread,
        ],
        "optimizer": optimizer,
        "scaler": [f"scaler = {fragments.scaler}"] if fragments.scaler else [],
        "mask": task.script.mask_argument,
        "step_arguments": _step_arguments(fragments),
        "counted": _COUNTED[task.script.unit],
        "unit": task.script.unit,
        "save": save,
        "end": ["dist.destroy_process_group()"] if fragments.spread else [],
    }
    return fill(template("main"), slots)
