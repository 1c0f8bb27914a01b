"""Hugging Face workloads train: a small variant of every model type takes a real step with its own data."""

import dataclasses
from typing import Any

import cloudpickle
import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.models import load_preset, preset_model
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload, of_length
from autofit.training.meta_model import parameters_on_meta
from tests import tiny

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "image_size": 28,
    "num_labels": 7,
}
# Presets of several model types, cut down; what only one family has (tied weights, windows, scaled RoPE) is kept.
FAMILIES = {
    "llama": "llama-3.1-8b",
    "tied llama": "llama-3.2-1b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "phi": "phi-1.5",
    "gpt2": "gpt2",
    "bert": "bert-base",
    "vit": "vit-base",
}


def small(name: str, task: str | None = None, **changes: Any) -> HuggingFaceModel:
    preset = load_preset(name)
    config = {key: SMALL.get(key, value) for key, value in preset.config.items()} | changes
    return HuggingFaceModel(name, task or preset.task, config, {"kind": "preset", "model": name})


def trains(workload: Workload, n: int = 3) -> torch.nn.Module:
    model = workload.model()
    loss = model(**workload.batch(n)).loss
    assert loss.dim() == 0
    assert loss.isfinite()
    loss.backward()
    assert any(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )
    return model


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
def test_a_small_variant_takes_a_step(name: str) -> None:
    workload = huggingface_workload(small(name))
    model = trains(cloudpickle.loads(cloudpickle.dumps(workload)))
    assert model.training
    assert not getattr(model.config, "use_cache", False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
def test_the_skeleton_has_no_weights_but_real_buffers_and_the_same_ties(name: str) -> None:
    factory = small(name)
    with parameters_on_meta():
        skeleton = factory()
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in skeleton.buffers()} <= {"cpu"}
    plain = factory()
    shapes = {key: value.shape for key, value in plain.named_parameters()}
    assert {key: value.shape for key, value in skeleton.named_parameters()} == shapes
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffer, skeleton.get_buffer(key))


@pytest.mark.parametrize("name", ["tiny-llama", "gpt2", "bert-base"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 4},
        {"num_labels": 1},
        {"num_labels": 4, "problem_type": "multi_label_classification"},
    ],
    ids=["classes", "regression", "multi-label"],
)
def test_sequence_classification_takes_a_step(name: str, changes: dict[str, Any]) -> None:
    """Decoders too, which transformers lets classify batches only with a padding token."""
    trains(
        huggingface_workload(small(name, "sequence-classification", **changes), sequence_length=8)
    )


def test_roberta_has_fewer_positions_than_embeddings() -> None:
    config = {
        "model_type": "roberta",
        "max_position_embeddings": 34,
        "pad_token_id": 1,
        "vocab_size": 99,
    }
    config |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    workload = huggingface_workload(HuggingFaceModel("roberta", "masked-lm", config))
    assert workload.sequence_length == 32
    trains(workload)


def test_a_convolutional_network_without_an_image_size_takes_a_step() -> None:
    config = {
        "model_type": "resnet",
        "embedding_size": 4,
        "hidden_sizes": [8, 8],
        "depths": [1, 1],
        "num_labels": 3,
    }
    workload = huggingface_workload(HuggingFaceModel("resnet", "image-classification", config))
    assert workload.batch(2)["pixel_values"].shape == (2, 3, 224, 224)
    trains(workload)


def test_oblong_images() -> None:
    config = {"image_size": [14, 28], "patch_size": 14}
    workload = huggingface_workload(small("vit-base", **config))
    assert workload.batch(2)["pixel_values"].shape == (2, 3, 14, 28)
    trains(workload)


def test_the_images_of_a_model_that_takes_text_too() -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = {
        "model_type": "siglip",
        "vision_config": {**sizes, "image_size": 16, "patch_size": 8},
        "num_labels": 2,
    }
    workload = huggingface_workload(HuggingFaceModel("siglip", "image-classification", config))
    assert workload.batch(2)["pixel_values"].shape == (2, 3, 16, 16)
    trains(workload)


def test_weights_are_float32_whatever_the_config_says() -> None:
    model = small("tiny-llama", dtype="bfloat16")()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_language_workload_counts_tokens() -> None:
    workload = huggingface_workload(preset_model("llama-3.1-8b"))
    assert workload.unit == "tokens"
    assert workload.loss is None
    assert (workload.name, workload.task) == ("llama-3.1-8b", "causal-lm")
    assert (workload.sequence_length, workload.effective_batch_size) == (2048, 32)
    assert workload.source == {"kind": "preset", "model": "llama-3.1-8b"}


def test_an_image_workload_counts_samples() -> None:
    workload = huggingface_workload(preset_model("vit-base"), effective_batch_size=64)
    assert (workload.unit, workload.sequence_length, workload.effective_batch_size) == (
        "samples",
        None,
        64,
    )
    assert workload.batch(2)["pixel_values"].shape == (2, 3, 224, 224)


@pytest.mark.parametrize(
    ("name", "length"), [("gpt2", 1024), ("bert-base", 512), ("llama-2-7b", 2048)]
)
def test_default_sequence_length_is_2048_or_the_shorter_maximum(name: str, length: int) -> None:
    assert huggingface_workload(preset_model(name)).sequence_length == length


def test_a_model_without_a_limit_takes_any_length() -> None:
    config = {"model_type": "bloom", "vocab_size": 99, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    model = HuggingFaceModel("bloom", "causal-lm", config)
    assert huggingface_workload(model).sequence_length == 2048
    assert huggingface_workload(model, sequence_length=100_000).sequence_length == 100_000


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("gpt2", 1025, "gpt2 takes sequences of at most 1024 tokens, not 1025. Give 1024 or less."),
        (
            "gpt2",
            1,
            "the sequence length must be a whole number of at least 2, not 1. For example 2048.",
        ),
        (
            "bert-base",
            0,
            "the sequence length must be a whole number of at least 1, not 0. For example 2048.",
        ),
        (
            "gpt2",
            True,
            "the sequence length must be a whole number of at least 2, not True. For example 2048.",
        ),
        (
            "vit-base",
            16,
            "vit-base is trained on images, which have no sequence length. Leave the sequence length out.",
        ),
    ],
)
def test_sequence_lengths_that_cannot_be(name: str, length: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        huggingface_workload(preset_model(name), sequence_length=length)
    assert str(caught.value) == message


def test_a_model_that_cannot_be_built_is_one_sentence() -> None:
    broken = dataclasses.replace(
        small("gpt2"), name="broken", config={"model_type": "gpt2", "n_embd": 30, "n_head": 4}
    )
    with pytest.raises(
        InputError,
        match=r"^broken cannot be built from its config: n_embd .* is 30, which n_head 4 does",
    ):
        broken()


def test_running_out_of_memory_is_not_blamed_on_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        small("gpt2")()


def test_a_config_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        huggingface_workload(small("tiny-llama", vocab_size=0))
    assert (
        str(caught.value)
        == "the config of tiny-llama needs a positive vocab_size, not 0. Correct config.json."
    )


def test_the_longest_sample_is_what_the_positions_allow() -> None:
    assert small("gpt2").longest() == 64
    roberta = {"model_type": "roberta", "max_position_embeddings": 64, "pad_token_id": 1}
    # numbered from behind the padding token
    assert HuggingFaceModel("r", "masked-lm", roberta).longest() == 62
    assert small(FAMILIES["vit"]).longest() is None


def test_another_length_keeps_the_teacher_the_loss_and_what_is_known_of_the_structure() -> None:
    workload = tiny.preference_workload(
        "distill", frozen={"teacher": tiny.llama()}, loss_options={"top_k": 4}
    )
    longer = of_length(workload, 48)
    assert longer.sequence_length == 48
    assert longer.loss == workload.loss
    assert longer.frozen == workload.frozen
    assert longer.traits == workload.traits
