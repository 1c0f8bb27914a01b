"""axolotl: the YAML of `axolotl train`.

It loads weights in the dtype of its autocast, and holds norms and embeddings in float32, unless
there are adapters or an attention without float32. Such a model fails at its first linear layer
without autocast, so full training in bfloat16 is exported as autocast. Keys of plugins count only
if the plugin is named.
"""

from functools import partial
from typing import Any

from autofit.core.some_blocks import SomeBlocks, offloads
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource
from autofit.export.tool import LANGUAGE_MODELS, Request, Tool, ToolKeys, trained_by
from autofit.export.trainer import learning

# What selective checkpointing saves in training all weights, as autofit's does.
SAVED = [
    "attention",
    *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm")),
]
# Triton kernels that axolotl switches on by itself beside adapters.
_LORA_KERNELS = (
    "lora_mlp_kernel",
    "lora_qkv_kernel",
    "lora_o_kernel",
    "lora_embedding_kernel",
)
_LIGER_KERNELS = (
    "liger_rope",
    "liger_rms_norm",
    "liger_layer_norm",
    "liger_glu_activation",
)
# torchao's, in the blocks that were measured; Trainer's deviate.
_TORCHAO = {"adamw-4bit": "ao_adamw_4bit", "adamw-fp8": "ao_adamw_fp8"}
_SAMPLES = "axolotl splits samples beside flash-attn and packing alone"
_FULL_TRAINING = {
    "bf16": "axolotl holds embeddings and norms in float32 and runs under autocast, "
    "in more memory than measured",
    "bf16-mixed": "axolotl holds all weights but embeddings and norms in bfloat16, "
    "with less memory and precision",
    "fp16-mixed": "axolotl holds the weights in float16, whose gradients its loss scaler refuses; "
    "use bf16-mixed",
}


def _precision(request: Request) -> ToolKeys:
    value = request.config.precision
    has_adapters = bool(request.config.lora_rank)
    keys: dict[str, Any] = {
        "bf16": value in ("bf16-mixed", "fp8") or (value == "bf16" and not has_adapters),
        "fp16": value == "fp16-mixed",
        "bfloat16": value == "bf16" and has_adapters,
        "float16": False,
        "tf32": value == "tf32",
        "fp8": value == "fp8",
    }
    if has_adapters:
        keys["peft_autocast_adapter_dtype"] = value not in ("bf16", "fp8")

    instead = None
    if value == "fp8":
        instead = (
            "axolotl chooses the layers by itself, "
            "and runs the rest under autocast with norms in float32"
        )
    elif not has_adapters:
        instead = _FULL_TRAINING.get(value)
    elif value == "bf16" and request.config.quantization != "none":
        instead = (
            "peft holds adapters beside quantised weights in float32, in more memory than measured"
        )

    return request.keys("precision", keys, instead, may_not_fit=value in ("bf16", "fp8"))


def _checkpointing(request: Request) -> ToolKeys:
    """By Trainer's names before transformers 5.23, which include `every_n_layers`."""
    knob = "activation_checkpointing"
    value = request.text(knob)
    deviations = shared.keywords(request, knob).deviations
    if value == "none" or value.startswith("budget-"):
        return ToolKeys({"gradient_checkpointing": False}, deviations)

    options: dict[str, Any] = {"use_reentrant": False}
    if value == "alternate":
        options["every_n_layers"] = 2
    keys: dict[str, Any] = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": options,
    }
    if value != "selective":
        return ToolKeys(keys, deviations)

    if not request.config.lora_rank:
        keys["selective_checkpointing"] = {"save": SAVED}
        return ToolKeys(keys)

    keys["selective_checkpointing"] = {"save": ["attention"]}
    why = (
        "beside adapters axolotl keeps the outputs of attention alone, "
        "with less memory and more time than measured"
    )

    return request.keys(knob, keys, why)


def _rank(request: Request) -> ToolKeys:
    rank = request.config.lora_rank
    if not rank:
        return ToolKeys()

    kind = "lora"
    if request.config.quantization in ("nf4", "nf4-dq"):
        kind = "qlora"
    return ToolKeys(
        {
            "adapter": kind,
            "lora_r": rank,
            **dict.fromkeys(_LORA_KERNELS, False),
        }
    )


def _targets(request: Request) -> ToolKeys:
    targets = request.source.layers(None)
    if targets is None:
        return ToolKeys({"lora_target_linear": True})
    return ToolKeys({"lora_target_modules": targets})


def _quantization(request: Request) -> ToolKeys:
    value = request.config.quantization
    four_bits = value in ("nf4", "nf4-dq")
    keys: dict[str, Any] = {"load_in_8bit": value == "int8", "load_in_4bit": four_bits}
    if request.source.experts:
        keys["quantize_moe_experts"] = four_bits
    if four_bits:
        keys["bnb_config_kwargs"] = {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": value == "nf4-dq",
        }

    return ToolKeys(keys)


def _optimizer(request: Request) -> ToolKeys:
    value = request.config.optimizer
    if value in _TORCHAO:
        return ToolKeys({"optimizer": _TORCHAO[value]})

    trainer = shared.keywords(request, "optimizer")
    keys = {"optimizer": trainer.arguments.get("optim", "adamw_torch")}
    for name in ("optim_args", "adam_beta2"):
        if name in trainer.arguments:
            keys[name] = trainer.arguments[name]

    return ToolKeys(keys, trainer.deviations)


def _data_parallel(request: Request) -> ToolKeys:
    """DDP is what axolotl does with several processes."""
    kind = request.config.data_parallel
    if kind == "ddp":
        ddp = {"ddp": True, "ddp_find_unused_parameters": True}
        return ToolKeys(ddp, as_measured=True)

    if kind != "fsdp":
        return ToolKeys(as_measured=True)

    keys = {
        "fsdp_version": 2,
        "fsdp_config.fsdp_version": 2,
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.state_dict_type": "FULL_STATE_DICT",
        "fsdp_config.final_state_dict_type": "FULL_STATE_DICT",
        "fsdp_config.cpu_ram_efficient_loading": request.config.quantization == "none",
    }
    autocast = request.config.precision in ("fp8", "bf16") and not request.config.lora_rank

    return several_devices.by_accelerate(request, keys, autocast=autocast)


def _replicate(request: Request) -> ToolKeys:
    layout = request.layout
    if not several_devices.is_fsdp(request) or layout.replicate == 1:
        return ToolKeys()
    return ToolKeys({"dp_replicate_size": layout.replicate, "dp_shard_size": layout.shard})


def _compile(request: Request) -> ToolKeys:
    """The mode that times several kernels has no name in axolotl; what it sets has."""
    value = request.config.compile
    if value == "none":
        return ToolKeys({"torch_compile": False})

    keys: dict[str, Any] = {
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": "default",
    }
    if value == "max-autotune-no-cudagraphs":
        keys["torch_compile_options"] = {
            "max_autotune_gemm": True,
            "triton.cudagraphs": False,
        }

    return ToolKeys(keys, shared.keywords(request, "compile").deviations)


def _layers(request: Request) -> ToolKeys:
    value = request.config.parameter_offload
    has_adapters = bool(request.config.lora_rank)
    keys = {"layer_offloading": offloads(value) and has_adapters}
    why = None
    if SomeBlocks.of(value):
        why = "axolotl offloads every layer, with less memory and more copies"
    if offloads(value) and not has_adapters:
        why = "axolotl offloads frozen layers only"

    return request.keys("parameter_offload", keys, why, may_not_fit=not has_adapters)


def _plugins(request: Request) -> dict[str, Any]:
    """The keys of both plugins, the same for both knobs that need one; none if neither is on."""
    has_kernels = request.config.kernels == "liger"
    is_split = request.layout.tensor > 1  # beside which axolotl refuses some of Liger's
    has_loss = request.config.loss == "fused" and not is_split
    plugins = []
    keys: dict[str, Any] = {}
    if has_kernels or has_loss:
        plugins.append("axolotl.integrations.liger.LigerPlugin")
        keys |= dict.fromkeys(_LIGER_KERNELS, has_kernels)
        keys["liger_rms_norm"] = has_kernels and not is_split
        keys |= {"liger_cross_entropy": False, "liger_fused_linear_cross_entropy": has_loss}

    if _is_cut(request):
        plugins.append("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin")
        keys["cut_cross_entropy"] = True

    if not plugins:
        return {}

    return {"plugins": plugins, **keys}


def _kernels(request: Request) -> ToolKeys:
    why = None
    if request.config.kernels == "liger" and request.layout.tensor > 1:
        why = (
            "axolotl refuses Liger's norms beside tensor parallelism, "
            "and computes them as the model does"
        )

    return request.keys("kernels", _plugins(request), why, may_not_fit=True)


def _is_cut(request: Request) -> bool:
    """Whether cut cross-entropy stands for the chunked loss: on a card, where axolotl itself
    computes in 16 bits."""
    if request.source.task not in LANGUAGE_MODELS:  # whose loss is not the model's own
        return False
    if request.config.loss != "chunked" or request.source.device != "cuda":
        return False
    keys = _precision(request).keys

    return bool(keys["bf16"] or keys["fp16"])


def _loss(request: Request) -> ToolKeys:
    """axolotl's chunked_cross_entropy holds the logits of all tokens, and only widens them in
    chunks."""
    is_cut = _is_cut(request)
    why = None
    if request.source.task not in LANGUAGE_MODELS:
        why = shared.all_logits(request)
    elif is_cut:
        why = (
            "axolotl never holds all logits by cut cross-entropy's kernels, "
            "which axolotl's fork of that package has"
        )
    elif request.config.loss == "fused" and request.layout.tensor > 1:
        why = (
            "axolotl refuses Liger's losses beside tensor parallelism, "
            "and holds the logits of all tokens"
        )
    elif request.config.loss == "chunked":
        why = (
            "axolotl holds the logits of all tokens; "
            "Liger's plugin with liger_fused_linear_cross_entropy never does"
        )

    return request.keys("loss", _plugins(request), why, may_not_fit=not is_cut)


def _data(source: ExportSource) -> dict[str, Any]:
    """The file that the search knew, and what of it is learnt."""
    loader = shared.loader_of_data(source)
    if source.task not in LANGUAGE_MODELS:
        return {"datasets": [{"path": "path/to/dataset", "type": "chat_template.default"}]}
    if loader is None:
        return {"datasets": [{"path": "path/to/dataset", "type": "completion"}]}

    entry: dict[str, Any] = {"path": source.data, "ds_type": loader}
    if source.form == "messages":
        entry |= {
            "type": "chat_template",
            "roles_to_train": ["assistant"],
            "train_on_eos": "turn",
        }
    elif source.form == "prompt+completion":
        fields = {"field_instruction": "prompt", "field_output": "completion"}
        entry["type"] = {
            **fields,
            "format": "{instruction}",
            "no_input_format": "{instruction}",
        }
    else:
        entry |= {"type": "completion", "field": "text"}

    return {"datasets": [entry], "train_on_inputs": False}


TOOL = Tool(
    title="axolotl",
    versions=("0.19.0",),
    caches_casts=False,
    run="axolotl train {file}",
    splits=("tensor_parallel",),
    run_several="axolotl train {file} --launcher torchrun -- --nproc_per_node={each}{rendezvous}",
    tasks=trained_by("axolotl"),
    packing="sample_packing",
    apart=True,
    expert_targets="lora_target_parameters",
    quantises_experts=("nf4", "nf4-dq"),
    fixed=lambda request: {
        "base_model": request.source.weights,
        **_data(request.source),
        **shared.of_task(request),
        "output_dir": "output",
        "sequence_len": request.source.sequence_length,
        "val_set_size": 0.0,
        "num_epochs": 1,
        **learning(request.config, "lr_scheduler"),
    },
    knobs={
        **shared.trainer_arguments(
            "gradient_accumulation_steps",
            "optimizer_offload",
            "optimizer_in_backward",
        ),
        **several_devices.rows(
            _data_parallel,
            _replicate,
            partial(several_devices.reshard, path="fsdp_config.reshard_after_forward"),
            partial(several_devices.offload, path="fsdp_config.offload_params"),
            tensor=partial(
                several_devices.split,
                knob="tensor_parallel",
                path="tensor_parallel_size",
            ),
            context=partial(several_devices.unsplit, knob="context_parallel", why=_SAMPLES),
        ),
        "precision": _precision,
        "micro_batch_size": lambda request: ToolKeys(
            dict.fromkeys(("micro_batch_size", "eval_batch_size"), request.config.micro_batch_size)
        ),
        "activation_checkpointing": _checkpointing,
        "activation_offload": lambda request: shared.offload_of_blocks(
            request,
            {"activation_offloading": False},
            {"activation_offloading": "hidden_states"},
            # Without checkpointing axolotl refuses to offload.
            "axolotl offloads with activation checkpointing only, "
            "and keeps activations on the device",
        ),
        "lora_rank": _rank,
        "lora_alpha": shared.whole_alpha,
        "lora_dropout": shared.lora_dropout,
        **shared.kinds_of_adapter(
            "peft_use_dora",
            "peft_use_rslora",
            lora_plus="loraplus_lr_ratio",
        ),
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _optimizer,
        "parameter_offload": _layers,
        "compile": _compile,
        "attention": shared.attention,
        "loss": _loss,
        "reference": lambda request: shared.reference(request, "precompute_ref_log_probs"),
        "kernels": _kernels,
    },
)
