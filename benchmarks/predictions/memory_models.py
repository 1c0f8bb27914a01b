"""The models that the memory benchmark trains: small enough that hundreds of real steps take minutes on two cores,
large enough that a peak is some tens of megabytes. What a case is made of is data; the network below is the plain
convolutional one, which no library gives at this size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autofit.core.task import TEACHER
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.workload import Workload
from autofit.models import load_preset
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.models.tasks.images import RandomImages
from autofit.models.tasks.text import ClassLabels

_CLASSES = {"id2label": {str(each): str(each) for each in range(10)}}


@dataclass(frozen=True)
class Case:
    """A model and the batch it is trained on.

    Attributes:
        config: as in config.json, or the arguments of `ConvNet`.
        budget_gib: what it is searched in, where one budget makes it a case.
        teacher: the config of a language model that it learns from.
    """

    task: str
    config: Mapping[str, Any]
    effective_batch_size: int
    sequence_length: int | None = None
    budget_gib: float | None = None
    teacher: Mapping[str, Any] | None = None

    def workload(self, name: str) -> Workload:
        """The training of it on random data."""
        if self.task == "convolutions":
            return _convolutions(name, self)
        model = HuggingFaceModel(name, self.task, self.config, {"kind": "directory", "path": name})
        frozen = {}
        if self.teacher is not None:
            frozen[TEACHER] = HuggingFaceModel(TEACHER, CAUSAL_LM.name, self.teacher)
        return huggingface_workload(
            model,
            frozen=frozen,
            sequence_length=self.sequence_length,
            effective_batch_size=self.effective_batch_size,
        )


@dataclass(frozen=True)
class Images:
    """n -> (images, class numbers)."""

    pixels: RandomImages

    def __call__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of n samples."""
        batch = self.pixels(n)
        return batch["pixel_values"], batch["labels"]


@dataclass(frozen=True)
class ConvNetFactory:
    """() -> the network."""

    config: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> ConvNet:
        """Build it on the current default device."""
        return ConvNet(**self.config)


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.shortcut = (
            nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if changes else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ConvNet(nn.Module):
    """A stem with a stride and a maximum pool, residual stages that halve the image, a hidden layer, a classifier."""

    def __init__(
        self, widths: tuple[int, ...], depth: int, kernel: int = 7, hidden: int = 512
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], kernel, stride=2, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for place in range(depth):
                blocks.append(Residual(before, width, 2 if stage and not place else 1))
                before = width
        self.blocks = nn.ModuleList(blocks)
        self.hidden = nn.Linear(before, hidden)
        self.classifier = nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(x))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(functional.relu(self.hidden(x)))


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over the images."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def _convolutions(name: str, case: Case) -> Workload:
    config = dict(case.config)
    size = config.pop("image_size")
    return Workload(
        model=ConvNetFactory(config),
        batch=Images(RandomImages(3, size, size, ClassLabels(10))),
        loss=cross_entropy,
        effective_batch_size=case.effective_batch_size,
        unit="samples",
        name=name,
    )


_LLAMA = load_preset("tiny-llama").config
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 4096,
    "n_embd": 256,
    "n_layer": 6,
    "n_head": 4,
    "n_positions": 256,
    # those it has by default are beyond this vocabulary
    **dict.fromkeys(("bos_token_id", "eos_token_id")),
}

_BERT = {
    "model_type": "bert",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
}

MODELS: dict[str, Case] = {
    "tiny-llama": Case("causal-lm", _LLAMA, 8, 128),
    "gpt2": Case("causal-lm", _GPT2, 8, 128),
    "bert": Case("masked-lm", _BERT, 8, 128),
    "vit": Case(
        "image-classification",
        {
            "model_type": "vit",
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
            "image_size": 96,
            "patch_size": 8,
            **_CLASSES,
        },
        8,
    ),
    "t5": Case(
        "seq2seq",
        {
            "model_type": "t5",
            "vocab_size": 4096,
            "d_model": 256,
            "d_kv": 64,
            "d_ff": 1024,
            "num_layers": 4,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        16,
        64,
    ),
    "llama-dpo": Case("dpo", _LLAMA, 8, 64),
    "gpt2-dpo": Case("dpo", _GPT2, 8, 64),
    "gpt2-simpo": Case("simpo", _GPT2, 8, 64),
    "llama-reward": Case("reward", _LLAMA, 8, 64),
    "llama-distill": Case("distill", _LLAMA, 8, 64, teacher=_LLAMA | {"hidden_size": 384}),
    "gpt2-kto": Case("kto", _GPT2, 8, 64),
    "gpt2-orpo": Case("orpo", _GPT2, 8, 64),
    "bert-embed": Case("embed", _BERT, 32, 32),
    "cnn": Case("convolutions", {"widths": (64, 128, 256, 512), "depth": 2, "image_size": 96}, 16),
}

# Causal language models of which every tier is recorded. The demo is the README's.
TIER_MODELS: dict[str, Case] = {
    "demo-tiers": Case("causal-lm", load_preset("tiny-llama").config, 16, 128, 2.0),
    "qwen3-tiers": Case(
        "causal-lm",
        {
            "model_type": "qwen3",
            "vocab_size": 8192,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
        8,
        128,
        0.25,
    ),
    "phi-tiers": Case(
        "causal-lm",
        {
            "model_type": "phi",
            "vocab_size": 8192,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
        },
        8,
        128,
    ),
}
