"""accelerate: the YAML of `accelerate launch --config_file`, with autocast and compiling. It knows
nothing of the model, the batch and the optimizer: those belong to the script that it launches."""

from autofit.export import several_devices
from autofit.export.shared_keys import convolutions
from autofit.export.tool import Request, Tool, ToolKeys

_AUTOCAST = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
_ONE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_machines": 1,
    "num_processes": 1,
    "machine_rank": 0,
}
_BY_MODEL = (
    "accelerate splits no layers by itself; the script has "
    "to load the model with transformers' DistributedConfig"
)
_INSTEAD = {
    "tf32": "accelerate multiplies in float32 unless the script sets torch.set_float32_matmul_precision('high')",
    "bf16": "accelerate casts no weights; the script has to load them in bfloat16",
    "fp8": "accelerate casts no weights; the script has to load them in bfloat16 and exchange the layers",
}


def _precision(request: Request) -> ToolKeys:
    value = request.config.precision
    instead = _INSTEAD.get(value, convolutions(request))
    keys = {"mixed_precision": _AUTOCAST.get(value, "no")}

    return request.keys("precision", keys, instead, may_not_fit=value in ("bf16", "fp8"))


def _compile(request: Request) -> ToolKeys:
    """Block by block, as it was measured."""
    value = request.config.compile
    if value == "none":
        return ToolKeys({"dynamo_config.dynamo_backend": "NO"})
    keys = {"backend": "INDUCTOR", "mode": value, "use_regional_compilation": True}
    keys |= {"use_dynamic": False, "use_fullgraph": False}

    return ToolKeys({f"dynamo_config.dynamo_{key}": value for key, value in keys.items()})


TOOL = Tool(
    title="accelerate",
    versions=("1.15.0",),
    refuse=lambda source: None,
    run="accelerate launch --config_file {file} YOUR_SCRIPT.py",
    splits=("tensor_parallel", "context_parallel"),
    # use_cpu of the file does not reach several processes, which would train apart from one
    # another.
    run_several="{on_cpu}accelerate launch --config_file {file}{further} YOUR_SCRIPT.py",
    fixed=lambda request: {
        **_ONE,
        "use_cpu": request.source.device == "cpu",
        "debug": False,
    },
    without="accelerate's config holds none; the script that it launches has to",
    knobs={
        **several_devices.accelerate(
            off=_ONE,
            tensor=_BY_MODEL,
            context=several_devices.RING.format("accelerate"),
        ),
        "precision": _precision,
        "compile": _compile,
    },
)
