"""Lightning: the `trainer:` section of a LightningCLI config, for any model.

What concerns the model, its data and its optimizer is the business of the user's LightningModule.
"""

from __future__ import annotations

from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import yaml_file
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit, unknown

_MODULES = "Lightning's Trainer has no argument for it; your LightningModule has to do it"
_ELSEWHERE = (
    *("activation_checkpointing", "activation_offload", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets"),
    *("quantization", "optimizer", "optimizer_offload", "optimizer_in_backward", "parameter_offload", "compile"),
    *("attention", "loss", "kernels"),
)
_FORMATS = {
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-true",
    "fp8": "bf16-true",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "16-mixed",
}


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    keys = {"trainer.precision": _FORMATS[value]}
    instead = {
        "tf32": "Lightning multiplies in float32 unless torch.set_float32_matmul_precision('high') is called",
        "fp8": "Lightning multiplies in bfloat16 here, which is slower than measured",
    }.get(value)
    if instead:
        return ToolKeys(keys, (request.departs("precision", instead),))
    if value.endswith("-mixed") and request.config["lora_rank"]:
        why = "Lightning leaves frozen weights as your module makes them, float32 if it does not say"
        return ToolKeys(keys, (request.departs("precision", why, may_not_fit=True),))
    return ToolKeys(keys, request.convolutions)


def _micro_batch(request: Request) -> ToolKeys:
    why = "Lightning takes the batches of your data module; give it this batch_size"
    return ToolKeys({}, (request.departs("micro_batch_size", why, may_not_fit=True),))


def _accumulation(request: Request) -> ToolKeys:
    return ToolKeys({"trainer.accumulate_grad_batches": request.config["gradient_accumulation_steps"]})


def _fixed(request: Request) -> dict[str, Any]:
    return {
        "trainer.accelerator": "cpu" if request.found.device == "cpu" else "gpu",
        "trainer.devices": 1,
        "trainer.max_epochs": 1,
        "trainer.gradient_clip_val": Hyperparameters().max_grad_norm,
    }


def _files(document: Document) -> dict[str, str]:
    return {"lightning.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="lightning",
    title="Lightning",
    versions=("2.6.6",),
    run="python YOUR_CLI.py fit --config lightning.yaml",
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        **{knob: unknown(knob, _MODULES) for knob in _ELSEWHERE},
        "precision": _precision,
        "micro_batch_size": _micro_batch,
        "gradient_accumulation_steps": _accumulation,
    },
)
