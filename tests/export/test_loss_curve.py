"""train.py and `autofit train` go through the same losses, bit for bit on a CPU: same seed, same data, same config."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ARCHITECTURES
from emitted import module_of

from autofit.train import TrainOptions, train_saved

# transformers, peft and torchao warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

DATA = Path(__file__).parents[2] / "examples" / "data"
LENGTH, BATCH, SAMPLES, STEPS = 16, 8, 21, 5  # three steps a pass; the last is filled up
SPLIT = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
DRAWS: dict[str, dict[str, Any]] = {  # with what makes each of them draw random numbers while it trains
    "llama": {**ARCHITECTURES["causal-lm"], "attention_dropout": 0.1},
    "gpt2": {**ARCHITECTURES["gpt2"], **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)},
    "masked-lm": {**ARCHITECTURES["masked-lm"], "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "image-classification": {**ARCHITECTURES["image-classification"], "hidden_dropout_prob": 0.1},
}
DRAWS["sequence-classification"] = DRAWS["masked-lm"]
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "masked-lm": "BertForMaskedLM",
    "sequence-classification": "BertForSequenceClassification",
    "image-classification": "ViTForImageClassification",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": SPLIT,
    "bf16": {"precision": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed", **SPLIT},
    "fp16-mixed": {"precision": "fp16-mixed"},
    "lora": LORA,
    "lora-bf16": {**LORA, "precision": "bf16", "lora_dropout": 0.1},
    "lora-bf16-mixed": {**LORA, "precision": "bf16-mixed", **SPLIT},
    "lora-attention": {**LORA, "lora_targets": "attention", "lora_alpha": 4},
    "lora-head": {**LORA, "lora_targets": "all-linear+head"},
    "nf4": {**LORA, "quantization": "nf4"},
    "nf4-bf16": {**LORA, "quantization": "nf4-dq", "precision": "bf16", "activation_checkpointing": "full"},
    "nf4-bf16-mixed": {**LORA, "quantization": "nf4", "precision": "bf16-mixed"},
    "int8": {**LORA, "quantization": "int8"},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective", **SPLIT},
    "alternate": {"activation_checkpointing": "alternate"},
    "eager": {"attention": "eager"},
    "foreach": {"optimizer": "adamw-foreach"},
    "8bit": {"optimizer": "adamw-8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "in-backward": {"optimizer_in_backward": True},
    "in-backward-8bit": {"optimizer_in_backward": True, "optimizer": "adamw-8bit", "precision": "bf16-mixed"},
}
CHUNKED: dict[str, dict[str, Any]] = {
    "chunked": {"loss": "chunked"},
    "chunked-split": {"loss": "chunked", **SPLIT, "precision": "bf16-mixed"},
    "chunked-bf16": {"loss": "chunked", "precision": "bf16", "optimizer_in_backward": True},
    "chunked-lora": {"loss": "chunked", **LORA},
    "chunked-lora-head": {"loss": "chunked", **LORA, "lora_targets": "all-linear+head", **SPLIT},
    "chunked-nf4": {"loss": "chunked", **LORA, "quantization": "nf4", "precision": "bf16-mixed"},
}
OTHER_TASKS = (  # where the data, the head or the dtype of the inputs take part
    *("fp32", "split", "bf16", "bf16-mixed", "lora-bf16", "lora-bf16-mixed", "lora-attention", "lora-head"),
    *("nf4", "nf4-bf16", "in-backward"),
)
CASES = [
    *(("llama", name) for name in (*CONFIGS, *CHUNKED)),
    *(("gpt2", name) for name in ("fp32", "bf16", "lora", "nf4", "lora-attention", "full", "selective", "alternate")),
    *(("gpt2", name) for name in ("split", "chunked", "chunked-bf16", "8bit")),
    *((kind, name) for kind in tuple(CLASSES)[2:] for name in OTHER_TASKS),
]


def data_for(kind: str, folder: Path) -> Path:
    """As many samples as do not divide by the batch."""
    if kind == "image-classification":
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
        torch.save({"pixel_values": images, "labels": torch.arange(SAMPLES) % 5}, folder / "images.pt")
        return folder / "images.pt"
    if kind == "sequence-classification":
        return DATA / "reviews.jsonl"
    path = folder / "text.txt"
    path.write_text((DATA / "alice.txt").read_text(encoding="utf-8")[: LENGTH * SAMPLES], encoding="utf-8")
    return path


def losses_of_autofit(kind: str, architecture: dict[str, Any], knobs: dict[str, Any], folder: Path) -> list[float]:
    """What `autofit train` reports, step by step."""
    (folder / "model").mkdir()
    config = {**architecture, "architectures": [CLASSES[kind]]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    result = {
        "autofit": 1,
        "model": "model",
        "workload": workload_of(kind),
        "source": {"kind": "directory", "path": str(folder / "model")},
        "hardware": {"device": "cpu"},
        "config": knobs,
    }
    (folder / "result.yaml").write_text(yaml.safe_dump(result))
    options = TrainOptions(steps=STEPS, lr=1e-3, seed=3)
    trained = train_saved(folder / "result.yaml", data_for(kind, folder), options)
    return [report.loss for report in trained.history]


def workload_of(kind: str) -> dict[str, Any]:
    task = "causal-lm" if kind in ("llama", "gpt2") else kind
    length = None if task == "image-classification" else LENGTH
    return {"task": task, "sequence_length": length, "effective_batch_size": BATCH}


def losses_of_script(script: str, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[float]:
    """What the script prints: nine digits, which tell any two float32 apart."""
    arguments = ["--data", str(data), "--steps", str(STEPS), "--log-every", "1", "--lr", "1e-3", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    module_of(script).main()
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", capsys.readouterr().out, re.MULTILINE)]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_losses_are_those_of_autofit_train(
    emit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    name: str,
) -> None:
    knobs = {**CONFIGS, **CHUNKED}[name]
    workload, architecture = workload_of(kind), DRAWS[kind]
    config = {"micro_batch_size": BATCH, "gradient_accumulation_steps": 1, **knobs}
    script = emit(workload["task"], {"workload": workload, "model_config": architecture}, **config)
    ours = losses_of_autofit(kind, architecture, config, tmp_path)
    theirs = losses_of_script(script, data_for(kind, tmp_path), monkeypatch, capsys)
    assert theirs == [float(f"{loss:.9g}") for loss in ours]
    assert len(set(ours)) > 1  # few bits of a loss in bf16 differ
