"""ms-swift: the YAML of `swift sft` and `swift rlhf`, whose keys are the options of these commands.

It checkpoints by default, in the reentrant way on one device, and trains adapters in peft's float32
unless `lora_dtype` says otherwise. It hands keys on as words of a command line, so that a key
without a value is left out.
"""

from typing import Any

from autofit.core.knobs.activation_checkpointing import checkpoints_blocks
from autofit.core.task import TEACHER
from autofit.core.tasks import task_named
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.tool import Request, Tool, ToolKeys, trained_by
from autofit.export.trainer import learning

_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attn"}
# Adapters that are trained in another precision than the weights beside them.
_HALF = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_FSDP = "fsdp.fsdp_config."


def _precision(request: Request) -> ToolKeys:
    """The dtype of the weights, that of adapters, and autocast, which it switches on where no key
    says otherwise."""
    value = request.config.precision
    has_adapters = bool(request.config.lora_rank)
    is_half = value in ("bf16", "fp8")

    weights = "bfloat16" if is_half else "float32"
    if has_adapters:
        weights = _HALF.get(value, weights)

    keys: dict[str, Any] = {
        "torch_dtype": weights,
        "bf16": value == "bf16-mixed",
        "fp16": value == "fp16-mixed",
    }
    if has_adapters:
        keys["lora_dtype"] = "bfloat16" if is_half else "float32"
    if value in ("fp32", "tf32") and request.source.device == "cuda":
        keys["tf32"] = value == "tf32"

    return request.keys(
        "precision",
        keys,
        shared.FP8.format("ms-swift") if value == "fp8" else None,
    )


def _checkpointing(request: Request) -> ToolKeys:
    is_on = checkpoints_blocks(request.config.activation_checkpointing)
    options = {"gradient_checkpointing_kwargs.use_reentrant": False} if is_on else {}
    return shared.whole_blocks_of_trainer(
        request,
        {
            "gradient_checkpointing": is_on,
            **options,
        },
    )


def _quantization(request: Request) -> ToolKeys:
    """How bitsandbytes holds the frozen weights."""
    value = request.config.quantization
    if value == "none":
        return ToolKeys()
    if value == "int8":
        return ToolKeys({"quant_method": "bnb", "quant_bits": 8})

    keys: dict[str, Any] = {
        "quant_method": "bnb",
        "quant_bits": 4,
        "bnb_4bit_quant_type": "nf4",
    }
    name = "bnb_4bit_quant_storage"
    storage = shared.keywords(request, "quantization").quantization.get(name)
    if storage:
        keys[name] = storage
    keys["bnb_4bit_use_double_quant"] = value == "nf4-dq"
    return ToolKeys(keys)


def _data_parallel(request: Request) -> ToolKeys:
    """How many processes there are on how many machines; each of these says which one it is in its
    environment."""
    world = request.layout.world
    nodes = request.nodes
    if world == 1:
        return ToolKeys(as_measured=True)

    keys: dict[str, Any] = {}
    if several_devices.is_fsdp(request):
        keys["fsdp.fsdp"] = "full_shard auto_wrap"
        if request.config.fsdp_offload == "cpu":
            keys["fsdp.fsdp"] += " offload"

    keys["ENV.NPROC_PER_NODE"] = world // nodes
    if nodes > 1:
        keys |= {
            "ENV.NNODES": nodes,
            "ENV.NODE_RANK": 0,
            "ENV.MASTER_ADDR": "FIRST_NODE",
        }
    if not several_devices.is_fsdp(request):
        return ToolKeys(keys)

    keys |= {
        f"{_FSDP}fsdp_version": 2,
        f"{_FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{_FSDP}state_dict_type": "FULL_STATE_DICT",
        f"{_FSDP}cpu_ram_efficient_loading": request.config.quantization == "none",
    }
    return several_devices.by_accelerate(request, keys)


def _replicate(request: Request) -> ToolKeys:
    """It has no groups of shards."""
    instead = None
    if several_devices.is_fsdp(request) and request.layout.replicate > 1:
        instead = "ms-swift divides weights over all devices, with less memory and more exchange"
    return request.keys("data_parallel_replicate", {}, instead)


def _lora_plus(request: Request) -> ToolKeys:
    """How many times faster the second matrices of adapters are trained."""
    ratio = request.config.lora_plus
    if not ratio:
        return ToolKeys()
    return ToolKeys({"lorap_lr_ratio": ratio})


def _fixed(request: Request) -> dict[str, Any]:
    task = task_named(request.source.task)
    teacher = {"teacher_model": request.source.teacher} if TEACHER in task.frozen else {}
    return {
        "model": request.source.weights,
        **teacher,
        **shared.of_task(request),
        "dataset": "your_dataset.jsonl",
        "max_length": request.source.sequence_length,
        "output_dir": "output",
        **learning(request.config),
        "adam_beta2": 0.999,
        "use_cpu": request.source.device == "cpu",
    }


TOOL = Tool(
    title="ms-swift",
    versions=("4.6.0",),
    stage="sft",
    run="swift {stage} {file}",
    tasks=trained_by("msswift"),
    packing="packing",
    apart=True,
    packs_beside_flash=True,
    expert_targets="target_parameters",
    fixed=_fixed,
    knobs={
        **shared.trainer_arguments(*shared.TRAINER_ALONE, "compile"),
        **several_devices.rows(
            *(_data_parallel, _replicate),
            reshard=lambda request: several_devices.reshard(
                request, "fsdp.fsdp_config.reshard_after_forward"
            ),
        ),
        "precision": _precision,
        "activation_checkpointing": _checkpointing,
        **shared.missing("ms-swift", "activation_offload"),
        "lora_rank": lambda request: shared.lora_rank(
            request,
            "lora_rank",
            {"tuner_type": "lora"},
            {"tuner_type": "full"},
        ),
        "lora_alpha": shared.lora_alpha,
        "lora_dropout": shared.lora_dropout,
        **shared.kinds_of_adapter(),
        "lora_plus": _lora_plus,
        "lora_targets": lambda request: ToolKeys(
            {"target_modules": request.source.layers(["all-linear"])}
        ),
        "quantization": _quantization,
        "attention": lambda request: ToolKeys(
            {"attn_impl": _ATTENTION.get(str(request.config.attention), "sdpa")}
        ),
        "reference": lambda request: shared.reference(request, None),
        **shared.liger_with_its_loss("use_liger_kernel"),
    },
)
