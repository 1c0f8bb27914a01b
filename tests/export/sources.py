"""ExportSources: a Llama of 8B, with any knob changed."""

from typing import Any

from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.export.pictures import FLUX, Pictures
from autofit.export.source import WEIGHTS, ExportSource
from autofit.export.tools import tool_named
from autofit.techniques import all_techniques

OFF = {technique.name: technique.off for technique in all_techniques()}
SIZES = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TARGETS = {"attention": ATTENTION, "all-linear": LINEAR, "all-linear+head": (*LINEAR, "lm_head")}
MEASURED = {
    "tokens_per_second": 5120.3,
    "samples_per_second": 2.5,
    "step_seconds": {"median": 3.2, "low": 3.1, "high": 3.3},
    "peak_gib": {"allocated": 20.1, "reserved": 21.0, "device": 21.6},
    "verified": True,
}
VERSIONS = {
    "autofit": "0.1.0",
    "python": "3.12.3",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "optuna": "5.0.0",
}
PICTURES = Pictures(FLUX, "black-forest-labs/FLUX.1-dev", 1024, 1024, None, 512, (19, 38))
OF_PICTURES = ("sdscripts", "aitoolkit", "onetrainer", "diffusers")  # tools for denoisers
LORA = {"precision": "bf16", "lora_rank": 16, "lora_targets": "all-linear"}

# On four cards of two machines, with the batch sizes of each; a whole effective batch is 8.
UNSPLIT = {"tensor_parallel": 1, "context_parallel": 1, "gradient_accumulation_steps": 1}
DDP = {"data_parallel": "ddp", "data_parallel_replicate": 4, "data_parallel_shard": 1, **UNSPLIT}
FSDP: dict[str, Any] = {
    "data_parallel": "fsdp",
    "data_parallel_replicate": 1,
    "data_parallel_shard": 4,
}
FSDP |= {"reshard_after_forward": True, "fsdp_offload": "none", **UNSPLIT}
ZERO_2 = {**FSDP, "reshard_after_forward": False}
HSDP = {**FSDP, "data_parallel_replicate": 2, "data_parallel_shard": 2}
TWO_SHARDS = {**FSDP, "data_parallel_shard": 2, "gradient_accumulation_steps": 2}
TENSOR = {**TWO_SHARDS, "tensor_parallel": 2}
CONTEXT = {**TWO_SHARDS, "context_parallel": 2}
NODES = {
    "hardware": {
        "device": "cuda",
        "name": "NVIDIA H200",
        "budget_gib": 24.0,
        "devices": 2,
        "nodes": 2,
    }
}

# What every tool's own parser is to accept.
CASES: dict[str, dict[str, Any]] = {
    "full": {"precision": "bf16", "activation_checkpointing": "full"},
    "lora": LORA,
    "qlora": {
        **LORA,
        "quantization": "nf4",
        "optimizer": "adamw-8bit",
        "activation_checkpointing": "full",
    },
    "compiled": {"precision": "bf16-mixed", "compile": "default", "loss": "chunked"},
    "ddp": {"precision": "bf16-mixed", **DDP},
    "fsdp": {**LORA, "activation_checkpointing": "full", **FSDP, "fsdp_offload": "cpu"},
    "hsdp": {"precision": "bf16", **HSDP, "reshard_after_forward": False},
    "tensor": {"precision": "bf16", **TENSOR},
    "context": {"precision": "bf16", **CONTEXT},
}


def source(
    device: str = "cuda",
    task: str = "causal-lm",
    others: dict[str, Any] | None = None,
    **knobs: Any,
) -> ExportSource:
    """A config to export; `others` are fields of ExportSource."""
    config = Config({**OFF, **SIZES, **knobs})
    if task == DIFFUSION.name:
        others = {"pictures": PICTURES, "weights": WEIGHTS, **(others or {})}
    fields: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "config": config,
        "hardware": {"device": device, "name": "NVIDIA H200", "budget_gib": 24.0},
        "task": task,
        "sequence_length": 2048,
        "effective_batch_size": 8,
        "measured": MEASURED,
        "versions": VERSIONS,
        "weights": "meta-llama/Llama-3.1-8B",
        "outputs": ("lm_head",) if config["lora_targets"] == "all-linear+head" else (),
        "targets": TARGETS.get(str(config["lora_targets"]), ()),
        "off": OFF,
    }
    return ExportSource(**{**fields, **(others or {})})


def for_tool(name: str, device: str = "cuda", **knobs: Any) -> ExportSource:
    """A config of a language model, or of what the tool trains instead."""
    tasks = tool_named(name).tasks
    task = "causal-lm" if not tasks or "causal-lm" in tasks else tasks[0]
    return source(device, task, **knobs)


def configs() -> st.SearchStrategy[dict[str, Any]]:
    """Any value of any knob beside any other, as far as they mean something together."""
    knobs = {
        technique.name: st.sampled_from((technique.off, *technique.values))
        for technique in all_techniques()
        if technique.values
    }
    numbers = {
        "lora_rank": st.sampled_from((0, 8, 64)),
        "lora_alpha": st.sampled_from((None, 4, 16, 32.5)),
        "lora_dropout": st.sampled_from((None, 0.1)),
        "lora_plus": st.sampled_from((None, 16.0)),
        "channels": st.sampled_from((None, "last")),  # a technique of one's own
    }
    return st.fixed_dictionaries({**knobs, **numbers}).map(_settled)


def _settled(knobs: dict[str, Any]) -> dict[str, Any]:
    if not knobs["lora_rank"]:
        off = {knob: OFF[knob] for knob in OFF if knob.startswith("lora_")}
        return {**knobs, **off, "quantization": "none"}
    return {**knobs, "lora_targets": knobs["lora_targets"] or "all-linear"}
