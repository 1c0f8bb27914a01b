"""What others measured on GPUs, row by row, as workloads and configs made of autofit's own models and knobs."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.hardware.catalogue import card, hardware_of
from autofit.models import preset_model
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from benchmarks.published_mpt import VOCABULARY, Mpt, mpt_loss

DATA = Path(__file__).with_name("data")
CARDS = {
    "A100-SXM4-40GB": "a100-40gb",
    "A100 40GB SXM": "a100-40gb",
    "a100_40gb": "a100-40gb",
    "A100 80GB": "a100-80gb",
    "A100 (80GB": "a100-80gb",
    "h100_80gb": "h100",
    "H100": "h100",
    "H200": "h200",
    "A10G 24GB": "a10g",
    "RTX 4090": "rtx-4090",
    "RTX 4070 Ti SUPER": "rtx-4070-ti-super",
    "NVIDIA L40S": "l40s",
    "A5000": "a5000",
    "A6000 Ada": "rtx-6000-ada",
}
QUANTISATIONS = {
    "none": "none",
    "bnb nf4": "nf4",
    "bnb 4-bit": "nf4",
    "bnb nf4 + double quant": "nf4-dq",
    "torchao NF4": "nf4-dq",
    "float8 (torchao, dynamic)": "fp8",
    "fp8 (Transformer Engine)": "fp8",
}
_PRESETS = {
    "Llama-3.2-3B": "llama-3.2-3b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-2-7B": "llama-2-7b",
    "Meta-Llama-3-8B": "llama-3-8b",
    "Llama-3-8B": "llama-3-8b",
    "Llama-2-13B": "llama-2-13b",
    "Llama-2-70b-hf": "llama-2-70b",
    "Llama-2-70B": "llama-2-70b",
}
_OPTIMIZERS = {
    "": "adamw-foreach",
    "torch AdamW": "adamw-foreach",
    "torch adamw": "adamw-foreach",
    "torch AdamW (HF adamw_torch, foreach)": "adamw-foreach",
    "torch AdamW fused": "adamw",
    "AdamW8bit": "adamw-8bit",
    "bnb AdamW8bit": "adamw-8bit",
    "bnb PagedAdamW8bit": "paged-adamw-8bit",
    "torchao AdamWFp8": "adamw-fp8",
    "torchao AdamW4bit": "adamw-4bit",
}
_CHECKPOINTING = {
    "no": "none",
    "not stated (script default no)": "none",
    "yes": "full",
    "yes (reentrant)": "full",
}
_CHECKPOINTING |= {"full": "full", "selective (op SAC)": "selective", "selective op": "selective"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_MODULES = {
    **{f"{each}": (f"{each}_proj",) for each in ("q", "k", "v", "o", "up", "down", "gate")},
    "mlp": _MLP,
}
# Word problems of Orca-Math are some 300 tokens long, and a batch of eight is padded to some 500: an assumption.
_SAMPLE, _PADDED = 300, 500
_WITHOUT_LIGER = ("gpt_bigcode", "vit")


def rows(name: str) -> list[dict[str, str]]:
    """The rows of one file, as they stand in it."""
    with (DATA / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def card_of(row: dict[str, str]) -> str | None:
    """The catalogue's name of the card that a row was measured on; None where it is not there."""
    return next((name for title, name in CARDS.items() if row["gpu"].startswith(title)), None)


def measured(row: dict[str, str]) -> float:
    """Seconds of a step of one card."""
    if row["s_per_step"]:
        return float(row["s_per_step"])
    return samples_of(row) * length_of(row) / context_of(row) / float(row["tokens_per_s"])


def samples_of(row: dict[str, str]) -> int:
    """The samples of one card's step."""
    return int(row["micro_batch"]) * int(row["grad_accum"] or 1)


def length_of(row: dict[str, str]) -> int:
    """The tokens of a sample."""
    return int(row["seq_len"] or (_SAMPLE if "padding-free" in row["note"] else _PADDED))


def context_of(row: dict[str, str]) -> int:
    """Among how many cards each sample is divided."""
    return int(row["parallelism"].partition("CP ")[2] or 1)


def inexpressible(row: dict[str, str]) -> str | None:
    """Why no model and knobs of autofit are what a row describes, or None."""
    if row["judged"] != "yes":
        return row["why_not"]
    if card_of(row) is None:
        return f"{row['gpu']} is not in the catalogue"
    if row["model"] not in _PRESETS and row["model"] not in _configs():
        return f"the architecture of {row['model']} is not written down here"
    if row["quant"] not in QUANTISATIONS or row["optimizer"] not in _OPTIMIZERS:
        return f"{row['quant']}, {row['optimizer']}: no knob of autofit"
    return None


def run_of(row: dict[str, str]) -> tuple[Workload, Config, Hardware]:
    """The workload, config and hardware of a row that can be expressed."""
    name = card_of(row)
    assert name is not None, "rows without a card are told apart"
    world = int(row["n_gpus"])
    hardware = hardware_of(card(name)).of_several(min(world, 8), max(1, world // 8))
    workload = _workload(row, samples_of(row) * world // context_of(row))
    return workload, Config(**_knobs(row, world)), hardware


def _configs() -> dict[str, Any]:
    return yaml.safe_load((DATA / "published_configs.yaml").read_text())  # type: ignore[no-any-return]


def _workload(row: dict[str, str], samples: int) -> Workload:
    if row["model"] in _PRESETS:
        model = preset_model(_PRESETS[row["model"]])
    elif row["model"].startswith("MPT"):
        return _mpt(_configs()[row["model"]], length_of(row), samples)
    else:
        config = _configs()[row["model"]]
        task = "image-classification" if config["model_type"] == "vit" else "causal-lm"
        model = HuggingFaceModel(row["model"], task, config)
    length = None if model.task == "image-classification" else length_of(row)
    if length and length > (model.longest() or length):  # rotary positions go on
        model = replace(model, config={**model.config, "max_position_embeddings": length})
    return huggingface_workload(model, sequence_length=length, effective_batch_size=samples)


def _mpt(sizes: list[int], length: int, samples: int) -> Workload:
    return Workload(
        model=partial(Mpt, *sizes, length),
        batch=partial(random_tokens, length),
        loss=mpt_loss,
        effective_batch_size=samples,
        unit="tokens",
        sequence_length=length,
    )


def random_tokens(length: int, count: int) -> dict[str, torch.Tensor]:
    """A batch of so many samples."""
    tokens = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens}


def _knobs(row: dict[str, str], world: int) -> dict[str, Any]:
    quantisation, rank = QUANTISATIONS[row["quant"]], int(float(row["lora_r"] or 0))
    kernels = "foak" in row["note"] + row["fused_loss"] or row["fused_loss"].startswith("Liger")
    liger = kernels and _model_type(row) not in _WITHOUT_LIGER
    if quantisation == "fp8":
        precision = "fp8"
    else:
        # accelerate makes fp32 masters of what FSDP trains under autocast.
        masters = row["param_dtype"].startswith("fp32") or (
            (rank or world > 1) and row["autocast"] != "none"
        )
        precision = "bf16-mixed" if masters else "bf16"
    loss = "chunked" if row["fused_loss"].startswith("CEWithChunked") else "standard"
    return {
        "precision": precision,
        "micro_batch_size": int(row["micro_batch"]),
        "activation_checkpointing": _CHECKPOINTING[row["checkpointing"]],
        "activation_offload": "cpu" if row["act_offload"] == "yes" else "none",
        "lora_rank": rank,
        "lora_targets": _targets(row["lora_targets"]) if rank else None,
        "quantization": "none" if quantisation == "fp8" else quantisation,
        "optimizer": _OPTIMIZERS[row["optimizer"]],
        "optimizer_in_backward": row["opt_in_bwd"] == "yes",
        # Transformer Engine's kernels are fused as a compiler's; PyTorch preferred its flash kernel to cuDNN's then.
        "compile": "default" if row["compile"] == "yes" or "Engine" in row["quant"] else "none",
        "attention": "sdpa" if row["model"].startswith(("timm", "MPT")) else "flash",
        "loss": "fused" if liger and row["fused_loss"].startswith("Liger") else loss,
        "kernels": "liger" if liger else "none",
        **(_parallel(row) if world > 1 else {}),
    }


def _parallel(row: dict[str, str]) -> dict[str, Any]:
    offloaded = "cpu" if row["opt_offload"].startswith("yes") else "none"
    return {"data_parallel": "fsdp", "context_parallel": context_of(row), "fsdp_offload": offloaded}


def _model_type(row: dict[str, str]) -> str:
    config = _configs().get(row["model"], {})
    return str(config["model_type"]) if isinstance(config, dict) and config else "llama"


def _targets(published: str) -> str:
    names = re.sub(r"\([^)]*\)", "", published).replace(" ", "").split(",")
    modules = {module for name in names for module in _MODULES[name]}
    if modules == {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return "attention"
    return "all-linear" if len(modules) == 7 else "+".join(sorted(modules))
