"""DeepSpeed: the JSON of `deepspeed.initialize(config=...)`, with the head as its first key.

JSON has no comments; DeepSpeed leaves keys alone that it does not know at the top. Each knob that ZeRO serves has the
stage that all of them together need.
"""

from __future__ import annotations

import json

from autofit.core.workload import Hyperparameters
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit, unknown

_MODELS = "DeepSpeed's config holds none; the script that makes the model has to"
_ELSEWHERE = (
    *("activation_offload", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "quantization"),
    *("optimizer_in_backward", "attention", "loss", "kernels"),
)
_STAGE = "zero_optimization.stage"
_AUTOCAST = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_OPTIMIZERS = {"adamw": "AdamW", "adamw-foreach": "AdamW", "adafactor": "Adafactor", "sgd": "SGD"}


def _stage(request: Request) -> int:
    """Of ZeRO: 3 streams weights, 2 steps on the host, 1 can hold state in bfloat16; 0 is none."""
    if request.text("parameter_offload") != "none":
        return 3
    if request.text("optimizer_offload") != "none":
        return 2
    return 1 if request.text("precision") in ("bf16", "fp8") else 0


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    narrow, autocast = value in ("bf16", "fp8"), value in _AUTOCAST
    keys = {
        _STAGE: _stage(request),
        "fp16.enabled": False,
        "bf16.enabled": narrow,
        **({"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True} if narrow else {}),
        "torch_autocast.enabled": autocast,
        **({"torch_autocast.dtype": _AUTOCAST[value]} if autocast else {}),
    }
    if value == "tf32":
        why = "DeepSpeed multiplies in float32 unless the script sets torch.set_float32_matmul_precision('high')"
        return ToolKeys(keys, (request.departs("precision", why),))
    if narrow:
        slower = " and multiplies in bfloat16, which is slower" if value == "fp8" else ""
        why = f"DeepSpeed updates through ZeRO's buffers, which come on top of what was measured{slower}"
        return ToolKeys(keys, (request.departs("precision", why, may_not_fit=True),))
    return ToolKeys(keys, request.convolutions)


def _micro_batch(request: Request) -> ToolKeys:
    return ToolKeys({"train_micro_batch_size_per_gpu": request.config["micro_batch_size"]})


def _accumulation(request: Request) -> ToolKeys:
    return ToolKeys({"gradient_accumulation_steps": request.config["gradient_accumulation_steps"]})


def _optimizer(request: Request) -> ToolKeys:
    """DeepSpeed's own fused AdamW, or a class of torch.optim."""
    value = request.text("optimizer")
    learning = Hyperparameters()
    keys = {
        "optimizer.type": _OPTIMIZERS.get(value, "AdamW"),
        "optimizer.params.lr": learning.lr,
        "optimizer.params.weight_decay": learning.weight_decay,
        "zero_allow_untested_optimizer": value in ("adafactor", "sgd"),
    }
    if keys["optimizer.type"] == "AdamW":
        keys["optimizer.params.torch_adam"] = value == "adamw-foreach"
    if value in _OPTIMIZERS:
        return ToolKeys(keys)
    why = "DeepSpeed names none in its config and runs its AdamW; give your own to deepspeed.initialize(optimizer=...)"
    return ToolKeys(keys, (request.departs("optimizer", why, may_not_fit=True),))


def _optimizer_offload(request: Request) -> ToolKeys:
    where = "zero_optimization.offload_optimizer"
    if request.text("optimizer_offload") == "none":
        return ToolKeys({f"{where}.device": "none"})
    return ToolKeys({_STAGE: _stage(request), f"{where}.device": "cpu", f"{where}.pin_memory": True})


def _parameter_offload(request: Request) -> ToolKeys:
    where = "zero_optimization.offload_param"
    if request.text("parameter_offload") == "none":
        return ToolKeys({f"{where}.device": "none"})
    why = "ZeRO streams all weights, those that are trained as well, and fetches ahead in its own way"
    keys = {_STAGE: _stage(request), f"{where}.device": "cpu", f"{where}.pin_memory": True}
    return ToolKeys(keys, (request.departs("parameter_offload", why),))


def _fixed(request: Request) -> dict[str, object]:
    return {"gradient_clipping": Hyperparameters().max_grad_norm or 0.0}


def _files(document: Document) -> dict[str, str]:
    return {"deepspeed.json": json.dumps({"_comment": list(document.head), **document.keys}, indent=2) + "\n"}


TOOL = Tool(
    name="deepspeed",
    title="DeepSpeed",
    versions=("0.19.8",),
    run='deepspeed.initialize(model=model, config="deepspeed.json")',
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        **{knob: unknown(knob, _MODELS) for knob in _ELSEWHERE},
        "activation_checkpointing": unknown(
            "activation_checkpointing",
            "DeepSpeed's serves only models that call its own checkpoint function; switch on that of the model",
        ),
        "compile": unknown("compile", "DeepSpeed compiles when the script calls engine.compile()", may_not_fit=False),
        "precision": _precision,
        "micro_batch_size": _micro_batch,
        "gradient_accumulation_steps": _accumulation,
        "optimizer": _optimizer,
        "optimizer_offload": _optimizer_offload,
        "parameter_offload": _parameter_offload,
    },
)
