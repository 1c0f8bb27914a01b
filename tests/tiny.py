"""Models of some tens of thousands of parameters, and the workloads of training them, that several rooms test with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Workload
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

CPU = Hardware(
    device="cpu",
    name="a CPU",
    memory_bytes=8 * GIB,
    host_memory_bytes=8 * GIB,
    host_free_bytes=8 * GIB,
    cores=2,
)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 128,  # matrices of 4096 elements, the least that 8-bit optimizers quantise
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(**changes: Any) -> HuggingFaceModel:
    """The factory of a Llama of two layers and 37 thousand parameters."""
    return HuggingFaceModel(
        "tiny", "causal-lm", LLAMA | changes, {"kind": "directory", "path": "tiny"}
    )


def llama_workload(
    effective_batch_size: int = 4, sequence_length: int = 16, **changes: Any
) -> Workload:
    """Training that Llama on random tokens."""
    return huggingface_workload(
        llama(**changes), sequence_length=sequence_length, effective_batch_size=effective_batch_size
    )


def preference_workload(
    task: str = "dpo", pairs: int = 4, tokens: int = 16, **options: Any
) -> Workload:
    """Training that Llama on random pairs of answers."""
    model = replace(llama(), task=task)
    return huggingface_workload(
        model, sequence_length=tokens, effective_batch_size=pairs, **options
    )


# What reads the images of a small LLaVA.
CLIP_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

# Without dropout, so that losses and gradients can be compared.
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    # those it has by default are beyond this vocabulary
    **dict.fromkeys(("bos_token_id", "eos_token_id")),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
BERT = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "image_size": 16,
    "patch_size": 4,
    "id2label": {str(each): str(each) for each in range(10)},
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}


_MIXTURE = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), 64
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
        2,
    ),
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
# of four experts; in the second, with biases and transposed
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32, "sliding_window": 8},
    "deepseek_v3": {
        **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group"), 1),
        **dict.fromkeys(
            ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 16
        ),
        "n_routed_experts": 4,
        "v_head_dim": 32,
    },
    "mixtral": {"num_local_experts": 4},
}


def mixture_workload(kind: str = "qwen3_moe", **changes: Any) -> Workload:
    """Training a mixture of experts of two layers, by its model_type."""
    return _of_transformers(
        "causal-lm", {"model_type": kind, **_MIXTURE, **MIXTURES[kind], **changes}, 4, 32
    )


def gpt2_workload(effective_batch_size: int = 4) -> Workload:
    """Training a GPT-2 of two layers, whose linear layers are transposed and whose head is tied."""
    return _of_transformers("causal-lm", GPT2, effective_batch_size, sequence_length=16)


def bert_workload(effective_batch_size: int = 4) -> Workload:
    """Training a BERT of two layers to fill in masked tokens."""
    return _of_transformers("masked-lm", BERT, effective_batch_size, sequence_length=16)


def bert(**changes: Any) -> HuggingFaceModel:
    """The factory of that BERT without its head."""
    config = {**BERT, **changes}
    return HuggingFaceModel("tiny", "embed", config, {"kind": "directory", "path": "tiny"})


def saved_encoder(path: Path, auto_class: str = "AutoModel") -> Path:
    """Random weights of that BERT, with one label, beside a tokenizer of the words w0 to w39."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**BERT, num_labels=1)
    getattr(transformers, auto_class).from_config(config).save_pretrained(path)

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{word}" for word in range(40))]
    vocabulary = {name: number for number, name in enumerate(names)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(path)
    return path


def vit_workload(effective_batch_size: int = 4) -> Workload:
    """Training a vision transformer of two layers."""
    return _of_transformers("image-classification", VIT, effective_batch_size, sequence_length=None)


def _of_transformers(
    task: str, config: dict[str, Any], batch: int, sequence_length: int | None
) -> Workload:
    model = HuggingFaceModel(
        str(config["model_type"]), task, config, {"kind": "directory", "path": "tiny"}
    )
    return huggingface_workload(model, sequence_length=sequence_length, effective_batch_size=batch)


class Block(nn.Module):
    """A pre-norm transformer layer as people write them by hand."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}
        )
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attn["qkv"](self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(-2)
        )
        x = x + self.attn["out"](mixed)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A plain language model that returns its own loss, which is a mean over all tokens."""

    def __init__(self, vocabulary: int = 48, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def _token_batch(samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    tokens, targets = (torch.randint(48, (samples, 12), generator=generator) for _ in range(2))
    return {"tokens": tokens, "targets": targets}


def transformer_workload(effective_batch_size: int = 4) -> Workload:
    """Training the plain language model."""
    return Workload(
        model=Transformer,
        batch=_token_batch,
        effective_batch_size=effective_batch_size,
        name="plain",
    )


class ConvBlock(nn.Module):
    """A residual convolution with its norm."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """A small image classifier; `norm` makes the layer of normalisation for a number of channels."""

    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, width: int = 16, depth: int = 3
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock(width, norm) for _ in range(depth)))
        self.fc = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class MLP(nn.Module):
    """Residual blocks of two linear layers on feature vectors."""

    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = features + layer(features)
        return self.out(features)


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a classifier on (inputs, classes)."""
    inputs, classes = batch
    return functional.cross_entropy(model(inputs).float(), classes)


def _image_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(
        10, (samples,), generator=generator
    )


def _feature_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 48, generator=generator), torch.randint(
        10, (samples,), generator=generator
    )


def conv_workload(
    effective_batch_size: int = 4, model: Callable[[], nn.Module] = ConvNet
) -> Workload:
    """Training the image classifier."""
    return Workload(
        model=model,
        batch=_image_batch,
        loss=classify,
        effective_batch_size=effective_batch_size,
        name="conv",
    )


def mlp_workload(effective_batch_size: int = 4) -> Workload:
    """Training the network on feature vectors."""
    return Workload(
        model=MLP,
        batch=_feature_batch,
        loss=classify,
        effective_batch_size=effective_batch_size,
        name="mlp",
    )


# valid labels from the front of each sample; of 0 and 1, none is predicted
LENGTHS = (16, 3, 9, 0, 16, 1, 5, 12)


def padded_batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Samples of these lengths, padded to 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (len(lengths), 16), generator=generator)
    padding = torch.arange(16) >= torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids.masked_fill(padding, 0), "labels": ids.masked_fill(padding, -100)}


def living(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model()
