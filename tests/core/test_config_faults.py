"""What is wrong with a model's config, or beside it with the batch, is named by the field, its value and the remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from autofit.core.config_faults import config_fault
from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.models.huggingface import HuggingFaceModel
from autofit.training.inspect import inspect_workload
from tests import tiny
from tests.api.fitting import fitted

LLAMA = {name: value for name, value in tiny.LLAMA.items() if name != "model_type"}
GPT2 = {name: value for name, value in tiny.GPT2.items() if name != "model_type"}
BERT = {name: value for name, value in tiny.BERT.items() if name != "model_type"}
VIT = {name: value for name, value in tiny.VIT.items() if name != "model_type"}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
LAYERS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
BART = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, **LAYERS}


def texts(n: int, *, length: int = 8, largest: int = 63, **others: Any) -> dict[str, torch.Tensor]:
    ids = torch.full((n, length), largest)
    return {"input_ids": ids, "labels": ids.clone(), **others}


def classes(n: int) -> dict[str, torch.Tensor]:
    return texts(n) | {"labels": torch.arange(n) % 3}


def images(n: int, channels: int, size: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.zeros(n, channels, size, size),
        "labels": torch.zeros(n, dtype=torch.long),
    }


OF_THE_BATCH: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], str]] = {
    "an unknown token": (
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
        lambda n: texts(n, largest=99),
        "vocab_size of the model's config (LlamaConfig) is 64, and input_ids of the batch go up to 99. Give the "
        "tokenizer of this model, or call model.resize_token_embeddings.",
    ),
    "too many positions": (
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
        lambda n: texts(n, length=40),
        "n_positions of the model's config (GPT2Config) is 32, and samples of the batch have 40 tokens. "
        "Cut them to 32 tokens.",
    ),
    "no padding token": (
        lambda: GPT2ForSequenceClassification(GPT2Config(**GPT2, num_labels=3)),
        classes,
        "pad_token_id of the model's config (GPT2Config) is None: the model cannot tell where a sample ends. Set "
        "model.config.pad_token_id to the padding token of the tokenizer.",
    ),
    "an unknown class": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=2, pad_token_id=0)),
        classes,
        "num_labels of the model's config (LlamaConfig) is 2, and labels of the batch go up to 2. Make the model with "
        "num_labels=3.",
    ),
    "an unknown type": (
        lambda: BertForMaskedLM(BertConfig(**BERT)),
        lambda n: texts(n, token_type_ids=torch.full((n, 8), 2)),
        "type_vocab_size of the model's config (BertConfig) is 2, and token_type_ids of the batch go up to 2. Leave "
        "them out, or number them from 0.",
    ),
    "no start": (
        lambda: T5ForConditionalGeneration(T5Config(**T5)),
        texts,
        "the model's config (T5Config) has no decoder_start_token_id, which the model needs. Set "
        "model.config.decoder_start_token_id.",
    ),
    "a field that the error names": (
        lambda: BartForConditionalGeneration(BartConfig(**BART, pad_token_id=None)),
        texts,
        "pad_token_id of the model's config (BartConfig) is None: self.model.config.pad_token_id has to be defined. "
        "Set model.config.pad_token_id.",
    ),
    "another kind of labels": (
        lambda: BertForSequenceClassification(
            BertConfig(**BERT, num_labels=3, problem_type="multi_label_classification")
        ),
        classes,
        "problem_type of the model's config (BertConfig) is 'multi_label_classification', and labels of the batch have "
        "the shape (",
    ),
    "another size": (
        lambda: ViTForImageClassification(ViTConfig(**VIT)),
        lambda n: images(n, 3, 8),
        "image_size of the model's config (ViTConfig) is 16, and pixel_values of the batch are 8 x 8. Resize the "
        "images, or make the model with that image_size.",
    ),
    "other channels": (
        lambda: ViTForImageClassification(ViTConfig(**VIT)),
        lambda n: images(n, 1, 16),
        "num_channels of the model's config (ViTConfig) is 3, and pixel_values of the batch have 1. Give images of as "
        "many channels.",
    ),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_what_does_not_go_together_with_the_batch(name: str) -> None:
    model, batch, message = OF_THE_BATCH[name]
    workload = Workload(model, batch, effective_batch_size=4)
    with pytest.raises(InputError) as in_a_search:
        inspect_workload(workload, tiny.CPU, tiny.CPU.memory_bytes)
    assert str(in_a_search.value).startswith(message)
    with pytest.raises(InputError) as in_training:
        fitted(model(), [batch(4)], loss=None)
    assert str(in_training.value).startswith(message)


OF_THE_MODEL = {
    "a padding token outside": (
        {**tiny.LLAMA, "pad_token_id": 64},
        "pad_token_id of the model's config (LlamaConfig) is 64, and vocab_size is 64: there is no such token. Set "
        "pad_token_id to a token of the vocabulary, or to None.",
    ),
    "heads": (
        {**tiny.BERT, "hidden_size": 30, "num_attention_heads": 4},
        "hidden_size of the model's config (BertConfig) is 30, which num_attention_heads 4 does not divide. Correct "
        "it where the model is made, or in its config.json.",
    ),
    "an unknown name": (
        {**tiny.LLAMA, "hidden_act": "gelo"},
        "hidden_act of the model's config (LlamaConfig) is 'gelo', which transformers does not know. Correct it where "
        "the model is made, or in its config.json.",
    ),
}


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_what_no_model_can_be_made_of(name: str) -> None:
    config, message = OF_THE_MODEL[name]
    task = "masked-lm" if config["model_type"] == "bert" else "causal-lm"
    with pytest.raises(InputError) as caught:
        HuggingFaceModel("tiny", task, config)()
    assert str(caught.value) == f"tiny cannot be built from its config: {message}"


def make_with_a_padding_token_outside() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, pad_token_id=64))


def test_nor_by_a_function_of_the_users() -> None:
    workload = Workload(make_with_a_padding_token_outside, texts)
    with pytest.raises(
        InputError, match=r"^pad_token_id of the model's config \(LlamaConfig\) is 64"
    ):
        inspect_workload(workload, tiny.CPU, None)


class Broken(nn.Module):
    """A mistake of the user's own beside a fine config."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(**LLAMA)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.weight[input_ids[0, 0]]


def test_another_mistake_is_not_taken_for_one_of_the_config() -> None:
    with pytest.raises(IndexError) as caught:
        Broken()(**texts(1))
    assert config_fault(caught.value) is None
    with pytest.raises(ZeroDivisionError) as without:
        1 / 0  # noqa: B018
    assert config_fault(without.value) is None
    with pytest.raises(
        InputError, match=r"the loss raised IndexError.*test_config_faults\.py.* Correct it there\."
    ):
        inspect_workload(Workload(Broken, texts), tiny.CPU, tiny.CPU.memory_bytes)


def test_a_line_of_a_library_is_not_to_be_corrected() -> None:
    def wrong(n: int) -> dict[str, torch.Tensor]:
        return texts(n) | {"position_ids": torch.zeros(n, 3, 8, 2, dtype=torch.long)}

    workload = Workload(lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), wrong)
    with pytest.raises(InputError) as caught:
        inspect_workload(workload, tiny.CPU, tiny.CPU.memory_bytes)
    assert (
        caught.value.remedy == "That line is a library's: check the batch and the model's config."
    )
