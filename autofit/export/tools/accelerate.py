"""accelerate: the YAML of `accelerate launch --config_file`, with autocast and compiling.

Of the model, the batch and the optimizer it knows nothing: those are the script's that it launches.
"""

from __future__ import annotations

from autofit.export.formats import yaml_file
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import unknown

_SCRIPTS = "accelerate's config holds none; the script that it launches has to"
_ELSEWHERE = (
    *("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "activation_offload"),
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "quantization", "optimizer", "optimizer_in_backward"),
    *("parameter_offload", "optimizer_offload", "attention", "loss", "kernels"),
)
_AUTOCAST = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
_WITHOUT = {
    "tf32": "accelerate multiplies in float32 unless the script sets torch.set_float32_matmul_precision('high')",
    "bf16": "accelerate casts no weights; the script has to load them in bfloat16",
    "fp8": "accelerate casts no weights; the script has to load them in bfloat16 and exchange the layers",
}


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    keys = {"mixed_precision": _AUTOCAST.get(value, "no")}
    if value not in _WITHOUT:
        return ToolKeys(keys, request.convolutions)
    return ToolKeys(keys, (request.departs("precision", _WITHOUT[value], may_not_fit=value != "tf32"),))


def _compile(request: Request) -> ToolKeys:
    """Block by block, as it was measured."""
    value = request.text("compile")
    if value == "none":
        return ToolKeys({"dynamo_config.dynamo_backend": "NO"})
    return ToolKeys(
        {
            "dynamo_config.dynamo_backend": "INDUCTOR",
            "dynamo_config.dynamo_mode": value,
            "dynamo_config.dynamo_use_regional_compilation": True,
            "dynamo_config.dynamo_use_dynamic": False,
            "dynamo_config.dynamo_use_fullgraph": False,
        }
    )


def _fixed(request: Request) -> dict[str, object]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "use_cpu": request.found.device == "cpu",
        "debug": False,
    }


def _files(document: Document) -> dict[str, str]:
    return {"accelerate.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="accelerate",
    title="accelerate",
    versions=("1.15.0",),
    run="accelerate launch --config_file accelerate.yaml YOUR_SCRIPT.py",
    fixed=_fixed,
    files=_files,
    knobs={
        **{knob: unknown(knob, _SCRIPTS) for knob in _ELSEWHERE},
        "precision": _precision,
        "compile": _compile,
    },
)
