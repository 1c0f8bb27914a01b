"""peft: adapter_config.json, which `PeftConfig.from_pretrained(DIRECTORY)` reads, and a README beside it.

JSON has no comments, and peft warns of keys that it does not know: what is to be said stands in the README.
"""

from __future__ import annotations

import json

from autofit.export.source import ExportSource
from autofit.export.tool import HUGGING_FACE, Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import lora_alpha, unknown

_ADAPTERS = "an adapter's config says nothing of it; the code that trains has to"
_TASKS = {"causal-lm": "CAUSAL_LM", "sequence-classification": "SEQ_CLS"}
_ELSEWHERE = (
    *("precision", "micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing"),
    *("activation_offload", "quantization", "optimizer", "optimizer_offload", "optimizer_in_backward"),
    *("parameter_offload", "compile", "attention", "loss", "kernels"),
)


def _has_adapters(found: ExportSource) -> str | None:
    return None if found.config.get("lora_rank") else "peft is about adapters, and this config trains all weights."


def _alpha(request: Request) -> ToolKeys:
    return ToolKeys({"lora_alpha": lora_alpha(request)})


def _dropout(request: Request) -> ToolKeys:
    return ToolKeys({"lora_dropout": request.config["lora_dropout"] or 0.0})


def _targets(request: Request) -> ToolKeys:
    return ToolKeys({"target_modules": list(request.found.targets) or "all-linear"})


def _fixed(request: Request) -> dict[str, object]:
    found = request.found
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(found.task),
        "base_model_name_or_path": found.weights,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": list(found.heads) or None,
    }


def _files(document: Document) -> dict[str, str]:
    text = json.dumps(dict(document.keys), indent=2)
    return {"peft/adapter_config.json": f"{text}\n", "peft/README.md": "\n".join(document.head) + "\n"}


TOOL = Tool(
    name="peft",
    title="peft",
    versions=("0.21.2",),
    run='get_peft_model(model, PeftConfig.from_pretrained("peft"))',
    tasks=HUGGING_FACE,
    refuse=_has_adapters,
    fixed=_fixed,
    files=_files,
    knobs={
        **{knob: unknown(knob, _ADAPTERS, may_not_fit=False) for knob in _ELSEWHERE},
        "lora_rank": lambda request: ToolKeys({"r": request.config["lora_rank"]}),
        "lora_alpha": _alpha,
        "lora_dropout": _dropout,
        "lora_targets": _targets,
    },
)
