"""train.py and `autofit train` go through the same losses, bit for bit on a CPU: same seed, same data, same config."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autofit.api.train import train
from tests.export.architectures import ARCHITECTURES
from tests.export.emitted import losses_printed, saved_weights

# transformers, peft and torchao warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

DATA = Path(__file__).parents[2] / "examples" / "data"
LENGTH, BATCH, SAMPLES, STEPS = 16, 8, 21, 4  # three steps a pass; the last is filled up
SPLIT = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
# with what makes each of them draw random numbers while it trains
DRAWS: dict[str, dict[str, Any]] = {
    "llama": {**ARCHITECTURES["causal-lm"], "attention_dropout": 0.1},
    "gpt2": {
        **ARCHITECTURES["gpt2"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    },
    "masked-lm": {
        **ARCHITECTURES["masked-lm"],
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    "image-classification": {**ARCHITECTURES["image-classification"], "hidden_dropout_prob": 0.1},
}
DRAWS["answers"] = DRAWS["llama"]
DRAWS["sequence-classification"] = DRAWS["masked-lm"]
# a head of two layers
DRAWS["roberta"] = {**DRAWS["masked-lm"], "model_type": "roberta", "pad_token_id": 0}
# finds the last token of each text by the padding
DRAWS["decoder"] = {**DRAWS["llama"], "num_labels": 2}
DRAWS["resnet"] = {  # with running statistics
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "id2label": {str(number): f"class {number}" for number in range(5)},
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "answers": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "masked-lm": "BertForMaskedLM",
    "sequence-classification": "BertForSequenceClassification",
    "image-classification": "ViTForImageClassification",
    "decoder": "LlamaForSequenceClassification",
    "resnet": "ResNetForImageClassification",
    "roberta": "RobertaForSequenceClassification",
}
TASKS = {
    "llama": "causal-lm",
    "answers": "causal-lm",
    "gpt2": "causal-lm",
    "resnet": "image-classification",
}
TASKS |= dict.fromkeys(("decoder", "roberta"), "sequence-classification")
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
    "nf4-bf16": {
        **LORA,
        "quantization": "nf4-dq",
        "precision": "bf16",
        "activation_checkpointing": "full",
    },
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
    "in-backward-8bit": {
        "optimizer_in_backward": True,
        "optimizer": "adamw-8bit",
        "precision": "bf16-mixed",
    },
}
CHUNKED: dict[str, dict[str, Any]] = {  # which only causal language models can be
    "chunked": {"loss": "chunked"},
    "chunked-split": {"loss": "chunked", **SPLIT, "precision": "bf16-mixed"},
    "chunked-bf16": {"loss": "chunked", "precision": "bf16", "optimizer_in_backward": True},
    "chunked-lora": {"loss": "chunked", **LORA},
    "chunked-lora-head": {"loss": "chunked", **LORA, "lora_targets": "all-linear+head", **SPLIT},
    "chunked-nf4": {"loss": "chunked", **LORA, "quantization": "nf4", "precision": "bf16-mixed"},
}
OTHER_TASKS = {  # where the data, the head or the dtype of the inputs take part
    "masked-lm": ("split", "bf16", "lora-bf16-mixed", "nf4-bf16"),
    "sequence-classification": ("split", "bf16", "lora-bf16", "lora-head", "nf4", "nf4-bf16"),
    "image-classification": ("split", "bf16-mixed", "lora-bf16", "lora-head", "nf4-bf16"),
}
CONFIGS |= CHUNKED
# What another model is tried with, and what a config above holds beside more.
ELSEWHERE = ("lora", "nf4", "alternate", "bf16-mixed", "8bit", "chunked", "chunked-bf16")
CASES = [
    *(("llama", name) for name in CONFIGS if name not in ELSEWHERE),
    *(
        ("gpt2", name)
        for name in (
            "bf16",
            "lora",
            "nf4",
            "lora-attention",
            "alternate",
            "chunked",
            "chunked-bf16",
        )
    ),
    *((kind, name) for kind, names in OTHER_TASKS.items() for name in names),
    *(("decoder", name) for name in ("fp32", "lora-bf16", "full")),
    *(("roberta", name) for name in ("fp32", "lora-bf16", "lora-head", "nf4")),
    *(("resnet", name) for name in ("fp32", "split", "bf16", "bf16-mixed", "in-backward")),
]


def data_for(kind: str, folder: Path) -> Path:
    """As many samples as do not divide by the batch."""
    if kind == "answers":
        rows = [
            {"prompt": "a" * (n % 9), "completion": "bc" * (n % 7)} for n in range(1, SAMPLES + 1)
        ]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return folder / "rows.jsonl"
    if kind in ("image-classification", "resnet"):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
        torch.save(
            {"pixel_values": images, "labels": torch.arange(SAMPLES) % 5}, folder / "images.pt"
        )
        return folder / "images.pt"
    if kind in ("sequence-classification", "decoder", "roberta"):
        return DATA / "reviews.jsonl"
    path = folder / "text.txt"
    path.write_text(
        (DATA / "alice.txt").read_text(encoding="utf-8")[: LENGTH * SAMPLES], encoding="utf-8"
    )
    return path


def losses_of_autofit(
    kind: str, knobs: dict[str, Any], folder: Path, weights: Path | None = None, **of_data: Any
) -> list[float]:
    """What `autofit train` reports, step by step."""
    (folder / "model").mkdir()
    config = {**DRAWS[kind], "architectures": [CLASSES[kind]]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    result = {
        "autofit": 1,
        "model": "model",
        "workload": {**workload_of(kind), **of_data},
        "source": {"kind": "directory", "path": str(folder / "model")},
        "hardware": {"device": "cpu"},
        "config": knobs,
    }
    (folder / "result.yaml").write_text(yaml.safe_dump(result))
    data = data_for(kind, folder)
    trained = train(folder / "result.yaml", data, steps=STEPS, lr=1e-3, seed=3, weights=weights)
    return [report.loss for report in trained.history]


def workload_of(kind: str) -> dict[str, Any]:
    task = TASKS.get(kind, kind)
    length = None if task == "image-classification" else LENGTH
    return {"task": task, "sequence_length": length, "effective_batch_size": BATCH}


@pytest.fixture
def losses_of_script(emit: Callable[..., str]) -> Callable[..., list[float]]:
    """What a script prints: nine digits, which tell any two float32 apart."""

    def losses(
        kind: str, knobs: dict[str, Any], data: Path, *more: str, **of_data: Any
    ) -> list[float]:
        workload = {**workload_of(kind), **of_data}
        script = emit(
            workload["task"], {"workload": workload, "model_config": DRAWS[kind]}, **knobs
        )
        arguments = [
            "--data",
            str(data),
            "--steps",
            str(STEPS),
            "--log-every",
            "1",
            "--lr",
            "1e-3",
            "--seed",
            "3",
        ]
        return losses_printed(script, *arguments, *more)

    return losses


def check(
    kind: str,
    name: str,
    losses_of_script: Callable[..., list[float]],
    folder: Path,
    *more: str,
    **of_data: Any,
) -> None:
    config = {"micro_batch_size": BATCH, "gradient_accumulation_steps": 1, **CONFIGS[name]}
    ours = losses_of_autofit(kind, config, folder, Path(more[1]) if more else None, **of_data)
    theirs = losses_of_script(kind, config, data_for(kind, folder), *more, **of_data)
    assert theirs == [float(f"{loss:.9g}") for loss in ours]
    assert len(set(ours)) > 1  # few bits of a loss in bf16 differ


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_losses_are_those_of_autofit_train(
    losses_of_script: Callable[..., list[float]], tmp_path: Path, kind: str, name: str
) -> None:
    check(kind, name, losses_of_script, tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "lora-bf16-mixed"),
        ("llama", "nf4-bf16"),
        ("gpt2", "bf16"),
        ("masked-lm", "fp32"),
        ("sequence-classification", "lora-bf16"),
        ("image-classification", "lora-bf16"),
    ],
)
def test_losses_from_given_weights_are_those_of_autofit_train(
    losses_of_script: Callable[..., list[float]], tmp_path: Path, kind: str, name: str
) -> None:
    weights = saved_weights(workload_of(kind)["task"], DRAWS[kind], tmp_path / "weights")
    check(kind, name, losses_of_script, tmp_path, "--weights", str(weights))


@pytest.mark.parametrize(
    ("kind", "name", "of_data"),
    [
        ("answers", "split", {"packing": True}),
        ("answers", "split", {"packing": True, "document_tokens": 12}),
        ("answers", "chunked", {"packing": True, "document_tokens": 12}),
        ("answers", "split", {"packing": False}),
        ("llama", "split", {"packing": True}),
    ],
)
def test_samples_are_packed_or_padded_as_autofit_train_does(
    losses_of_script: Callable[..., list[float]],
    tmp_path: Path,
    kind: str,
    name: str,
    of_data: dict[str, Any],
) -> None:
    check(kind, name, losses_of_script, tmp_path, **of_data)
