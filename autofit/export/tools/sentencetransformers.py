"""sentence-transformers: a script that trains sentence embeddings, or a cross-encoder, with its
Trainer.

A loss that compares all texts of a batch is given the whole effective batch, and its cached form
(GradCache) the micro-batch, as autofit does.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from autofit.core.quoting import comment
from autofit.core.tasks import task_named
from autofit.export import several_devices, trainer_scripts
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource, batch_sizes
from autofit.export.template import (
    call,
    fill,
    import_from,
    keyword_arguments,
    literal,
    template,
)
from autofit.export.tool import Header, Request, Tool, ToolKeys, with_keys_of
from autofit.export.trainer import learning
from autofit.export.trainer_scripts import under
from autofit.report.formatting import listed

_KERNELS = (
    "Trainer puts none of Liger's kernels into models of sentence-transformers, "
    "and keeps more for the backward"
)
_LOSS = "sentence-transformers computes the loss of whole texts in its own way"


def _arguments(request: Request, knob: str) -> ToolKeys:
    """Its training arguments, by the names of the transformers that it was measured with."""
    share = shared.arguments(request, knob)
    keys = share.keys
    if request.measured_before("transformers", shared.RENAMED):
        keys = shared.named_before(keys)

    return ToolKeys(under("arguments", keys), share.deviations)


def _micro_batch(request: Request) -> ToolKeys:
    """The batch of a step, and of a cached loss the texts that go through the model at once."""
    if not shared.of_task(request)["whole_batch"]:
        return _arguments(request, "micro_batch_size")

    source = request.source
    micro, steps = batch_sizes(source.config, source.effective_batch_size)
    whole = micro * steps * source.layout.dp_degree
    keys: dict[str, Any] = {"arguments.per_device_train_batch_size": whole}
    if micro < whole:
        texts = len(task_named(source.task).rows[0])
        keys["loss.mini_batch_size"] = micro * texts

    return ToolKeys(keys)


def _accumulation(request: Request) -> ToolKeys:
    if not shared.of_task(request)["whole_batch"]:
        return _arguments(request, "gradient_accumulation_steps")
    return ToolKeys({"arguments.gradient_accumulation_steps": 1}, as_measured=True)


def _precision(request: Request) -> ToolKeys:
    share = _arguments(request, "precision")
    return ToolKeys({**share.keys, **trainer_scripts.precision(request)}, share.deviations)


def _targets(request: Request) -> ToolKeys:
    source = request.source
    keys: dict[str, Any] = {"lora.target_modules": source.layers("all-linear")}
    if source.heads:
        keys["lora.modules_to_save"] = list(source.heads)

    return ToolKeys(keys)


def _fixed(request: Request) -> dict[str, Any]:
    return {
        "arguments.output_dir": "output",
        **under("arguments", learning(request.config)),
        "arguments.use_cpu": request.source.device == "cpu",
    }


def _files(
    source: ExportSource,
    keys: Mapping[str, Any],
    header: Header,
    file: str,
) -> dict[str, str]:
    """The script that makes the model, its loss and its trainer."""
    task = task_named(source.task)
    columns = list(task.rows[0])
    names = task.tools["sentencetransformers"]
    kind = names["class"]

    loss = names["loss_class"]
    options = keys.get("loss", {})
    if options:
        loss = f"Cached{loss}"

    imports = [
        import_from("sentence_transformers", kind, f"{kind}Trainer", f"{kind}TrainingArguments"),
        import_from(f"sentence_transformers.{names['module']}.losses", loss),
    ]
    if "lora" in keys:
        imports.insert(0, import_from("peft", "LoraConfig"))

    model: list[str] = []
    options_of_model = keyword_arguments(keys["model"])
    quantization = keys.get("quantization")
    if quantization:
        imports.append(import_from("transformers", "BitsAndBytesConfig"))
        given = keyword_arguments(quantization)
        model += call("quantization = BitsAndBytesConfig", given, indent=0)
        options_of_model.append("quantization_config=quantization")

    given = [literal(source.weights), f"model_kwargs=dict({', '.join(options_of_model)})"]
    if task.scores:
        given.append("num_labels=1")
    model += call(f"model = {kind}", given, indent=0)
    if source.sequence_length:
        model.append(f"model.max_seq_length = {source.sequence_length}")

    arguments = keyword_arguments(keys["arguments"])
    of_loss = ["model", *keyword_arguments(options)]
    trained = ["model", "arguments", "train_dataset=data", "loss=loss"]
    slots = {
        "head": comment(header),
        **trainer_scripts.environment_lines(keys.get("environment", {})),
        "imports": imports,
        "fields": listed(columns),
        "columns": literal(columns),
        "model": model,
        "adapters": trainer_scripts.adapter_lines(keys, "model.add_adapter(lora)"),
        "arguments": call(f"arguments = {kind}TrainingArguments", arguments, indent=0),
        "loss": call(f"loss = {loss}", of_loss, indent=0),
        "trainer": call(f"trainer = {kind}Trainer", trained, indent=0),
    }

    return {file: fill(template("sentence_transformers"), slots)}


TOOL = Tool(
    title="sentence-transformers",
    versions=("6.2.0",),
    run="python {file} FILE.jsonl",
    tasks=with_keys_of("sentencetransformers"),
    fixed=_fixed,
    file="train_sentence_transformers.py",
    files=_files,
    knobs={
        **{knob: partial(_arguments, knob=knob) for knob in shared.TRAINER_ALONE},
        **several_devices.on_one_device("sentence-transformers"),
        "micro_batch_size": _micro_batch,
        "gradient_accumulation_steps": _accumulation,
        "precision": _precision,
        "activation_checkpointing": partial(_arguments, knob="activation_checkpointing"),
        "activation_offload": partial(_arguments, knob="activation_offload"),
        **trainer_scripts.adapters_and_weights(),
        "lora_targets": _targets,
        "compile": lambda request: shared.compile_by_blocks(request, "arguments.", "environment"),
        **shared.missing("sentence-transformers", kernels=_KERNELS, loss=_LOSS),
    },
)
