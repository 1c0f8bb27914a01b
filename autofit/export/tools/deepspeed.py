"""DeepSpeed: the JSON of `deepspeed.initialize(config=...)`, with the header as its first key.

JSON has no comments, and DeepSpeed ignores unknown keys at the top level. Every knob that ZeRO
serves writes the stage that all of them together need.
"""

import json
from dataclasses import replace
from functools import partial
from typing import Any

from autofit.core.learning_rates import default_hyperparameters
from autofit.core.workload import Hyperparameters
from autofit.export import several_devices
from autofit.export.shared_keys import ADAFACTOR_EPS, convolutions, missing, values
from autofit.export.tool import Request, Tool, ToolKeys

_CHECKPOINTING = (
    "DeepSpeed's serves only models that call its own checkpoint function; "
    "switch on that of the model"
)
_SAMPLES = "DeepSpeed splits samples in scripts that register its Ulysses attention alone"
_STREAMED = (
    "ZeRO streams all weights, those outside blocks as well, and fetches ahead in its own way"
)
_STAGE = "zero_optimization.stage"
# Elements; of DeepSpeed's own 500 million each device would hold 1 to 2 GB beside the rest.
_BUCKET = 20_000_000
_AUTOCAST = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_OPTIMIZERS = dict.fromkeys(("adamw", "adamw-foreach", "adamw-master"), "AdamW")
_OPTIMIZERS |= {"adafactor": "Adafactor", "sgd": "SGD"}


def _stage(request: Request) -> int:
    """ZeRO's stage: 3 streams weights or gathers them twice, 2 steps on the host or gathers them
    once, 1 can hold state in bfloat16; 0 is none."""
    if several_devices.is_fsdp(request):
        return 2 if request.config.reshard_after_forward is False else 3

    if request.config.parameter_offload != "none":
        return 3
    if request.config.optimizer_offload != "none":
        return 2

    return 1 if request.config.precision in ("bf16", "fp8") else 0


def _zero(request: Request) -> dict[str, Any]:
    """The stage, and how it collects gradients: in buckets where they are divided, else in none
    beside them."""
    stage = _stage(request)
    if stage == 0:
        return {_STAGE: stage}
    if stage == 1:
        return {_STAGE: stage, "zero_optimization.contiguous_gradients": False}

    return {_STAGE: stage, "zero_optimization.reduce_bucket_size": _BUCKET}


def _precision(request: Request) -> ToolKeys:
    value = request.config.precision
    is_narrow = value in ("bf16", "fp8")
    keys = {**_zero(request), "fp16.enabled": False, "bf16.enabled": is_narrow}
    # what DeepSpeed does unless it is told otherwise
    if is_narrow and request.config.optimizer != "adamw-master":
        keys["bf16.bf16_master_weights_and_grads"] = True
        keys["bf16.bf16_optimizer_states"] = True

    keys["torch_autocast.enabled"] = value in _AUTOCAST
    if value in _AUTOCAST:
        keys["torch_autocast.dtype"] = _AUTOCAST[value]

    instead = convolutions(request)
    if value == "tf32":
        switch = "torch.set_float32_matmul_precision('high')"
        instead = f"DeepSpeed multiplies in float32 unless the script sets {switch}"
    elif is_narrow:
        instead = "DeepSpeed updates through ZeRO's buffers, which come on top of what was measured"

    if value == "fp8":
        instead = f"{instead} and multiplies in bfloat16, which is slower"

    return request.keys("precision", keys, instead, may_not_fit=is_narrow)


def _optimizer(request: Request) -> ToolKeys:
    """DeepSpeed's own fused AdamW, or a class of torch.optim."""
    value = str(request.config.optimizer)
    learning = default_hyperparameters(request.config)
    keys = {
        "optimizer.type": _OPTIMIZERS.get(value, "AdamW"),
        "optimizer.params.lr": learning.lr,
        "optimizer.params.weight_decay": learning.weight_decay,
        "zero_allow_untested_optimizer": value in ("adafactor", "sgd"),
    }
    if keys["optimizer.type"] == "AdamW":
        keys["optimizer.params.torch_adam"] = value == "adamw-foreach"
    elif keys["optimizer.type"] == "Adafactor":
        keys["optimizer.params.eps"] = ADAFACTOR_EPS

    if value in _OPTIMIZERS:
        return ToolKeys(keys)

    given = "give your own to deepspeed.initialize(optimizer=...)"
    why = f"DeepSpeed names none in its config and runs its AdamW; {given}"
    return request.keys("optimizer", keys, why, may_not_fit=True)


def _offload(
    request: Request,
    knob: str,
    section: str,
    instead: str | None = None,
) -> ToolKeys:
    """The keys of one section, which parts of FSDP on the host switch on as well."""
    with_fsdp = request.config.fsdp_offload == "cpu" and (
        section == "offload_optimizer" or _stage(request) == 3
    )
    section = f"zero_optimization.{section}"
    own = request.text(knob) != "none"
    if not own and not with_fsdp:
        return ToolKeys({f"{section}.device": "none"})

    keys = {
        _STAGE: _stage(request),
        f"{section}.device": "cpu",
        f"{section}.pin_memory": True,
    }
    if not own:
        return ToolKeys(keys)

    return request.keys(knob, keys, instead)


def _data_parallel(request: Request) -> ToolKeys:
    kind = request.config.data_parallel
    stage = _stage(request)
    why = None
    if kind == "fsdp":
        copies = f"keeps copies of its parts, and collects gradients in a buffer of {_BUCKET:,}"
        why = f"ZeRO {stage} {copies} elements, on top of what was measured"
    elif kind == "ddp" and stage:
        state = "the optimizer's state over the devices, in less memory than measured"
        why = f"ZeRO {stage} divides {state}"
    elif kind == "ddp":
        why = (
            "DeepSpeed frees gradients after each step, which DDP's buckets keep, "
            "in less memory than measured"
        )

    share = request.keys("data_parallel", {_STAGE: stage}, why, may_not_fit=kind == "fsdp")

    return replace(share, as_measured=True)


def _replicate(request: Request) -> ToolKeys:
    layout = request.layout
    if not several_devices.is_fsdp(request) or layout.replicate == 1:
        return ToolKeys(as_measured=True)

    why = (
        "ZeRO divides gradients and the optimizer's state over all devices, "
        "in less memory and with more traffic than measured"
    )

    return request.keys("data_parallel_replicate", _secondary(request, layout.shard), why)


def _reshard(request: Request) -> ToolKeys:
    """Groups that share weights until the backward are a secondary partition."""
    value = request.config.reshard_after_forward
    keys = {_STAGE: _stage(request)}
    if type(value) is int:
        keys = _secondary(request, value)

    return ToolKeys(keys, as_measured=True)


def _secondary(request: Request, devices: int) -> dict[str, Any]:
    stage = _stage(request)
    if stage != 3:
        return {_STAGE: stage}
    return {_STAGE: stage, "zero_optimization.zero_hpz_partition_size": devices}


def _parts(request: Request) -> ToolKeys:
    """The other offloads write the keys."""
    why = None
    if request.config.fsdp_offload == "cpu" and _stage(request) == 2:
        why = "ZeRO 2 keeps whole weights on every device, and offloads the optimizer alone"
    share = request.keys("fsdp_offload", {}, why, may_not_fit=True)

    return replace(share, as_measured=True)


TOOL = Tool(
    title="DeepSpeed",
    versions=("0.19.8",),
    run="deepspeed.initialize(model=model, config={literal})",
    splits=("tensor_parallel",),
    run_several="{torchrun} YOUR_SCRIPT.py, "
    "in which deepspeed.initialize(model=model, config={literal})",
    fixed=lambda request: {"gradient_clipping": Hyperparameters().max_grad_norm or 0.0},
    file="deepspeed.json",
    files=lambda source, keys, header, file: {
        file: json.dumps({"_comment": list(header), **keys}, indent=2) + "\n"
    },
    without="DeepSpeed's config holds none; the script that makes the model has to",
    knobs={
        **missing("DeepSpeed", activation_checkpointing=_CHECKPOINTING),
        **missing(
            "DeepSpeed",
            may_not_fit=False,
            compile="DeepSpeed compiles when the script calls engine.compile()",
        ),
        **several_devices.rows(
            _data_parallel,
            _replicate,
            _reshard,
            _parts,
            tensor=partial(
                several_devices.split,
                knob="tensor_parallel",
                path="tensor_parallel.autotp_size",
            ),
            context=partial(several_devices.unsplit, knob="context_parallel", why=_SAMPLES),
        ),
        "precision": _precision,
        **values(micro_batch_size="train_micro_batch_size_per_gpu"),
        **values(gradient_accumulation_steps="gradient_accumulation_steps"),
        "optimizer": _optimizer,
        "optimizer_offload": lambda request: _offload(
            request,
            "optimizer_offload",
            "offload_optimizer",
        ),
        "parameter_offload": lambda request: _offload(
            request,
            "parameter_offload",
            "offload_param",
            _STREAMED,
        ),
    },
)
