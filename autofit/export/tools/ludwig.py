"""Ludwig: the YAML of `ludwig train --config` for a model of kind `llm`. It trains weights in the
dtype of the checkpoint, mixes precision by one switch, and has neither offloading nor a loss
without the logits."""

from autofit.core.learning_rates import default_learning_rate
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.tool import LANGUAGE_MODELS, Request, Tool, ToolKeys

# By autofit's names; Ludwig's have underscores.
_OPTIMIZERS = (
    "adamw",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "lion-8bit",
    "adafactor",
    "sgd",
)


def _precision(request: Request) -> ToolKeys:
    value = request.config.precision
    why = "Ludwig leaves weights in the format of the checkpoint, and mixes in the one that the device prefers"
    keys = {"trainer.use_mixed_precision": value.endswith("-mixed")}

    return request.keys(
        "precision",
        keys,
        None if value == "fp32" else why,
        may_not_fit=True,
    )


def _targets(request: Request) -> ToolKeys:
    targets = list(request.source.targets) or None
    why = "the names of its layers are not known here, and Ludwig takes those that peft has for the kind of model"
    return request.keys(
        "lora_targets",
        {"adapter.target_modules": targets},
        None if targets else why,
    )


def _quantization(request: Request) -> ToolKeys:
    """How bitsandbytes holds the frozen weights."""
    value = request.config.quantization
    if value == "none":
        return ToolKeys({})
    if value == "int8":
        return ToolKeys({"quantization.bits": 8})

    dtypes = {"fp16-mixed": "float16", "fp32": "float32"}
    return ToolKeys(
        {
            "quantization.bits": 4,
            "quantization.bnb_4bit_quant_type": "nf4",
            "quantization.bnb_4bit_use_double_quant": value == "nf4-dq",
            "quantization.bnb_4bit_compute_dtype": dtypes.get(request.config.precision, "bfloat16"),
        }
    )


def _optimizer(request: Request) -> ToolKeys:
    """The optimizer by its name; AdamW where Ludwig has none of it."""
    value = str(request.config.optimizer)
    name = value.removesuffix("-foreach")
    is_known = name in _OPTIMIZERS
    instead = None
    if not is_known:
        name = "adamw"
        instead = "Ludwig has none; its AdamW, of 8 bytes for each weight that is trained, takes its place"
    elif value == "adamw-foreach":
        instead = "Ludwig has one AdamW, and lets PyTorch choose how it goes through the weights"

    keys = {"trainer.optimizer.type": name.replace("-", "_")}
    return request.keys("optimizer", keys, instead, may_not_fit=not is_known)


def _compile(request: Request) -> ToolKeys:
    on = request.config.compile != "none"
    why = "Ludwig compiles the model as one, in its default mode"
    return request.keys("compile", {"trainer.compile": on}, why if on else None)


TOOL = Tool(
    title="Ludwig",
    versions=("0.17.10",),
    run="ludwig train --config {file} --dataset DATA",
    tasks=LANGUAGE_MODELS,
    packs=False,
    fixed=lambda request: {
        "model_type": "llm",
        "base_model": request.source.weights,
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "preprocessing.global_max_sequence_length": request.source.sequence_length,
        "trainer.type": "finetune",
        "trainer.epochs": 1,
        "trainer.learning_rate": default_learning_rate(request.config),
    },
    knobs={
        **shared.missing(
            "Ludwig",
            *(
                "activation_offload",
                "optimizer_offload",
                "optimizer_in_backward",
                "parameter_offload",
                "kernels",
            ),
            attention="Ludwig takes the attention that transformers chooses",
            loss="Ludwig holds the logits of all tokens",
        ),
        **several_devices.on_one_device("Ludwig"),
        "precision": _precision,
        **shared.values(micro_batch_size="trainer.batch_size"),
        **shared.values(gradient_accumulation_steps="trainer.gradient_accumulation_steps"),
        "activation_checkpointing": lambda request: shared.whole_blocks(
            request, "trainer.enable_gradient_checkpointing"
        ),
        "lora_rank": lambda request: shared.lora_rank(
            request,
            "adapter.r",
            beside={"adapter.type": "lora"},
        ),
        "lora_alpha": lambda request: shared.whole_alpha(request, "adapter.alpha"),
        "lora_dropout": lambda request: shared.lora_dropout(request, "adapter.dropout"),
        **shared.kinds_of_adapter("adapter.use_dora", "adapter.use_rslora"),
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _optimizer,
        "compile": _compile,
    },
)
