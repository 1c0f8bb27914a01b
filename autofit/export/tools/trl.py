"""TRL: the YAML of `trl sft --config`, keys of SFTConfig, ModelConfig and ScriptArguments side by
side.

Its loss always goes through a fused output head in chunks: the logits of all tokens are never held,
and an adapter on the head is refused. Adapters are held in float32 (peft's default), beside
quantised weights in bfloat16.

What its commands train none of is trained by a trainer of its experimental package: a short script
makes that of the same YAML. These hold all logits.
"""

from collections.abc import Mapping
from typing import Any

from autofit.core.knobs.activation_checkpointing import checkpoints_blocks
from autofit.core.quoting import comment
from autofit.core.task import TEACHER
from autofit.core.tasks import task_named
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource
from autofit.export.template import fill, import_from, literal, template
from autofit.export.tool import LANGUAGE_MODELS, Header, Request, Tool, ToolKeys, trained_by
from autofit.export.trainer import learning

_SCRIPT = "train_trl.py"
_LOSS_INSTEAD = {
    "standard": "TRL goes through the logits in chunks and never holds them all, "
    "in less memory than measured",
    "fused": "TRL goes through the logits in chunks without Liger's kernel, "
    "and never holds them all either",
}
_ON_CPU = (
    "on a CPU TRL holds several copies of a chunk of the logits, "
    "up to 4,096 tokens by 32,768 of the vocabulary, more than measured"
)
_IN_FLOAT32 = (
    "TRL adds up the gradient of the output head in float32, and needs more memory than measured"
)


def _precision(request: Request) -> ToolKeys:
    """TRL's default dtype of weights is float32, so it is always written out."""
    share = shared.arguments(request, "precision")
    trainer = shared.keywords(request, "precision")
    keys = {"dtype": trainer.model["dtype"], **share.keys}
    dtype = "float32"
    size = "more"
    if request.config.quantization != "none":
        dtype = "bfloat16"
        size = "less"

    if not request.config.lora_rank or trainer.trained_dtype == dtype:
        return ToolKeys(keys, share.deviations)

    instead = f"TRL holds adapters in {dtype}, {size} memory than measured"
    deviation = request.deviation("precision", instead, may_not_fit=size == "more")
    return ToolKeys(keys, (*share.deviations, deviation))


def _checkpointing(request: Request) -> ToolKeys:
    """By the names of the transformers that it was measured with."""
    knob = "activation_checkpointing"
    share = shared.arguments(request, knob)
    keys = dict(share.keys)
    deviations = share.deviations
    if request.config.activation_checkpointing == "selective":
        keys["activation_checkpointing_kwargs"] |= {"selective": True}
        instead = (
            "TRL keeps the outputs of attention, not those of other products, "
            "with less memory and more time than measured"
        )
        deviations = (request.deviation(knob, instead),)

    if request.measured_before("transformers", shared.RENAMED):
        keys = shared.named_before(keys)

    return ToolKeys(keys, deviations)


def _offload(request: Request) -> ToolKeys:
    """In checkpointed blocks an option of checkpointing, elsewhere TRL's own."""
    knob = "activation_offload"
    own = request.config.activation_offload != "none"
    task = task_named(request.source.task)
    if _experimental(request.source) and not task.packs:
        lacks = "this trainer of TRL offloads nothing, and needs more memory than measured"
        return request.keys(knob, {}, lacks if own else None, may_not_fit=own)

    if own and checkpoints_blocks(request.config.activation_checkpointing):
        off = {} if task.generated else {"activation_offloading": False}
        return ToolKeys(off, shared.keywords(request, knob).deviations)

    if task.generated:
        lacks = "TRL has no offloading where samples are generated, and needs more memory"
        return request.keys(knob, {}, lacks if own else None, may_not_fit=own)

    return ToolKeys({"activation_offloading": own})


def _quantization(request: Request) -> ToolKeys:
    value = request.config.quantization
    keys = {
        "load_in_4bit": value in ("nf4", "nf4-dq"),
        "load_in_8bit": value == "int8",
        "bnb_4bit_quant_type": "nf4",
    }
    storage = shared.keywords(request, "quantization").quantization.get("bnb_4bit_quant_storage")
    if storage:
        keys["bnb_4bit_quant_storage"] = storage
    keys["use_bnb_nested_quant"] = value == "nf4-dq"

    return ToolKeys(keys)


def _targets(request: Request) -> ToolKeys:
    source = request.source
    keys = {"lora_target_modules": source.inner_targets or source.layers(["all-linear"])}
    if not source.adapts_head:
        return ToolKeys(keys)
    why = "TRL refuses an adapter on the output head; it has none"

    return request.keys("lora_targets", keys, why)


def _loss(request: Request) -> ToolKeys:
    """Its chunks are a small part of the logits on a card, where Triton's kernel works within
    them."""
    if request.source.task not in LANGUAGE_MODELS:
        return _loss_of_answers(request)

    keys = {"loss_type": "nll"}
    if request.source.own_loss == TOOL.name:
        return ToolKeys(keys, as_measured=True)
    if request.source.device == "cpu":
        return request.keys("loss", keys, _ON_CPU, may_not_fit=True)

    value = request.config.loss
    is_narrow = request.config.precision in ("bf16", "fp8") and not request.config.lora_rank
    if value != "standard" and is_narrow:
        return request.keys("loss", keys, _IN_FLOAT32, may_not_fit=True)
    if value in _LOSS_INSTEAD:
        return request.keys("loss", keys, _LOSS_INSTEAD[value])

    return ToolKeys(keys, as_measured=True)


def _loss_of_answers(request: Request) -> ToolKeys:
    """In chunks, too; that of a reward model has no logits of a vocabulary."""
    if task_named(request.source.task).scores:
        return ToolKeys()

    if _experimental(request.source):
        return request.keys("loss", {}, shared.all_logits(request), may_not_fit=True)
    if request.source.device == "cpu" and request.config.loss == "chunked":
        return request.keys("loss", {}, _ON_CPU, may_not_fit=True)
    if request.config.loss == "chunked":
        return ToolKeys(as_measured=True)

    return request.keys("loss", {}, _LOSS_INSTEAD["standard"])


def _kernels(request: Request) -> ToolKeys:
    """Liger's kernels without its losses, which TRL refuses."""
    if request.config.kernels != "liger":
        return ToolKeys({"use_liger_kernel": False})
    without = {"cross_entropy": False, "fused_linear_cross_entropy": False}

    return ToolKeys({"use_liger_kernel": True, "liger_kernel_config": without})


def _data(source: ExportSource) -> dict[str, Any]:
    """The file that the search knew, and what of it is learnt."""
    loader = shared.loader_of_data(source)
    if loader is None or source.task not in LANGUAGE_MODELS:
        named: dict[str, Any] = {"dataset_name": "path/to/dataset"}
        if task_named(source.task).generated:
            named["reward_funcs"] = ["accuracy_reward"]
        return named

    return {
        "datasets": [{"path": loader, "data_files": source.data}],
        "assistant_only_loss": source.form == "messages",
        "completion_only_loss": source.form == "prompt+completion",
    }


def _experimental(source: ExportSource) -> tuple[str, str] | None:
    """The module and the name of a trainer, less its last word, for what no command of TRL
    trains."""
    stage = task_named(source.task).stages.get(TOOL.name, "")
    module, _, name = stage.rpartition(".")
    if not module:
        return None

    return module, name


def _files(
    source: ExportSource,
    keys: Mapping[str, Any],
    header: Header,
    file: str,
) -> dict[str, str]:
    made = several_devices.launched("trl")(source, keys, header, file)
    experimental = _experimental(source)
    if experimental is None:
        return made

    module, name = experimental
    further = []
    if TEACHER in task_named(source.task).frozen:
        arguments = f"{literal(source.teacher)}, dtype=given.dtype"
        further = [f"teacher_model=AutoModelForCausalLM.from_pretrained({arguments}),"]

    slots = {
        "head": comment((f"{name} of {module}; what is trained stands in {file}.",)),
        "trainer": import_from(module, f"{name}Config", f"{name}Trainer"),
        "config": f"{name}Config",
        "class": f"{name}Trainer",
        "further": further,
    }
    made[_SCRIPT] = fill(template("trl"), slots)

    return made


def _length(request: Request) -> dict[str, Any]:
    """What a sample is cut to; what is generated has lengths of its own."""
    if task_named(request.source.task).generated:
        return {}
    return {"max_length": request.source.sequence_length}


def _how_to_learn(request: Request) -> dict[str, Any]:
    if request.source.task not in LANGUAGE_MODELS:
        return {**shared.of_task(request), **request.source.generation}
    # samples are cut where a sequence ends, as they were
    return {"packing_strategy": "wrapped"}


TOOL = Tool(
    title="TRL",
    versions=("1.16.0",),
    stage="sft",
    run="trl {stage} --config {file} "
    "(with the transformers that it was measured with, or a later 5.x)",
    splits=("context_parallel",),
    run_several="trl {stage} --config {file} --accelerate_config trl_accelerate.yaml{further}",
    files=_files,
    script=_SCRIPT,
    tasks=trained_by("trl"),
    has_own_loss=lambda device, task: device == "cpu" and task in LANGUAGE_MODELS,
    packing="packing",
    apart=False,
    expert_targets="lora_target_parameters",
    fixed=lambda request: {
        "model_name_or_path": request.source.weights,
        **_data(request.source),
        "output_dir": "output",
        **_length(request),
        **_how_to_learn(request),
        **learning(request.config),
        "use_cpu": request.source.device == "cpu",
    },
    knobs={
        **shared.trainer_arguments(*shared.TRAINER_ALONE),
        **several_devices.accelerate("accelerate.", context=several_devices.RING.format("TRL")),
        "precision": _precision,
        "activation_checkpointing": _checkpointing,
        "activation_offload": _offload,
        "lora_rank": lambda request: shared.lora_rank(
            request,
            "lora_r",
            {"use_peft": True},
            {"use_peft": False},
        ),
        "lora_alpha": shared.whole_alpha,
        "lora_dropout": shared.lora_dropout,
        **shared.kinds_of_adapter(),
        "lora_targets": _targets,
        "quantization": _quantization,
        "compile": lambda request: shared.compile_by_blocks(request, "", "env"),
        "attention": shared.attention,
        "loss": _loss,
        "reference": lambda request: shared.reference(request, "precompute_ref_log_probs"),
        "kernels": _kernels,
    },
)
