"""What comes out of training is read by the library it belongs to, and gives the outputs of the trained model."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.core.workload import Hyperparameters, Workload
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup import Setup
from autofit.setup.quantised_layers import is_quantised
from autofit.training import atomic_writes, save_model
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny

# peft asks transformers for it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def classifier() -> Workload:
    factory = HuggingFaceModel(
        "tiny", "sequence-classification", tiny.BERT, {"kind": "directory", "path": "tiny"}
    )
    return huggingface_workload(factory, sequence_length=16, effective_batch_size=4)


WORKLOADS = {
    "llama": tiny.llama_workload(),
    "llama, tied": tiny.llama_workload(tie_word_embeddings=True),
    "gpt2": tiny.gpt2_workload(),  # transposed layers, tied head
    "classifier": classifier(),
    # Of four experts all: else the rounding of activations to int8 would choose others.
    "mixtral": tiny.mixture_workload("mixtral", num_experts_per_tok=4),
    "qwen3_moe": tiny.mixture_workload("qwen3_moe", num_experts_per_tok=4),
}
ADAPTERS = [
    ("llama", {}),
    ("llama", {"quantization": "nf4"}),
    ("llama", {"quantization": "int8"}),
    ("llama", {"precision": "bf16"}),
    ("llama", {"precision": "bf16-mixed"}),
    ("llama, tied", {"lora_targets": "all-linear+head"}),
    ("gpt2", {}),
    ("gpt2", {"quantization": "nf4-dq"}),
    ("gpt2", {"quantization": "int8"}),
    ("gpt2", {"lora_targets": "all-linear+head", "precision": "bf16"}),
    ("classifier", {}),
    ("classifier", {"precision": "bf16-mixed", "lora_targets": "attention"}),
    ("classifier", {"quantization": "nf4", "lora_targets": "attention"}),
    *(
        (mixture, {"lora_targets": "attention+experts", "quantization": value})
        for mixture in ("mixtral", "qwen3_moe")
        for value in ("none", "int8", "nf4", "nf4-dq")
    ),
]


def trained(
    name: str, config: dict[str, Any], steps: int = 3
) -> tuple[Setup, dict[str, torch.Tensor]]:
    """A run that has learned in a few large steps, and the weights it began with."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    base = workload.model()
    before = {key: value.clone() for key, value in base.state_dict().items()}
    setup = build(workload, config, tiny.CPU, model=base, hyperparameters=Hyperparameters(lr=2e-2))
    for _ in range(steps):
        train_step(setup, workload.batch(4))
    return setup, before


@torch.no_grad()
def logits(model: Any, workload: Workload) -> torch.Tensor:
    return model.eval()(**workload.batch(2)).logits.float()


@torch.no_grad()
def trained_logits(setup: Setup) -> torch.Tensor:
    with setup.forward_context():
        return logits(setup.model, setup.workload)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, by the spread of the outputs."""
    return float((one - other).abs().max() / other.std())


def tolerance(config: dict[str, Any]) -> float:
    """The rounding of bf16, and of activations to int8; else of fp32. Outputs of four times their spread are 0.03 of it
    apart in bf16, and the last layers of both models round."""
    return 0.1 if config.get("quantization") == "int8" or "precision" in config else 1e-5


# What is written.


def test_a_plain_module_is_saved_as_safetensors(tmp_path: Path) -> None:
    workload = tiny.conv_workload()
    setup = build(
        workload, {}, tiny.CPU, model=workload.model().to(memory_format=torch.channels_last)
    )
    train_step(setup, workload.batch(4))
    save_model.save_model(setup, tmp_path / "new" / "out")
    read = tiny.ConvNet()
    safetensors.torch.load_model(read, tmp_path / "new" / "out" / "model.safetensors")
    assert all(map(torch.equal, read.state_dict().values(), setup.model.state_dict().values()))


class Tied(nn.Module):
    """A language model by hand whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.Transformer()
        self.inner.head.weight = self.inner.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens, targets)


def test_tied_weights_of_a_plain_module_are_saved_once_and_read_back_tied(tmp_path: Path) -> None:
    batch = tiny.transformer_workload().batch
    workload = Workload(model=Tied, batch=batch, effective_batch_size=4)
    setup = build(workload, {}, tiny.CPU, model=Tied())
    train_step(setup, batch(4))
    save_model.save_model(setup, tmp_path)
    read = Tied()
    safetensors.torch.load_model(read, tmp_path / "model.safetensors")
    assert read.inner.head.weight is read.inner.embed.weight
    assert torch.equal(read(**batch(2)), setup.model(**batch(2)))


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_transformers_model_is_read_by_from_pretrained(
    tmp_path: Path, name: str, precision: str
) -> None:
    from transformers import AutoModelForCausalLM

    setup, _ = trained(name, {"precision": precision})
    save_model.save_model(setup, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(logits(read, setup.workload), logits(setup.model, setup.workload))


# peft sees to that itself
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
# and asks us
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning"
)
@pytest.mark.parametrize(("name", "config"), ADAPTERS, ids=str)
def test_an_adapter_is_read_by_peft(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    """On the weights that it was trained beside, which adapters that have learned nothing leave as they are."""
    from peft import PeftModel

    setup, _ = trained(name, {"lora_rank": 4, **config})
    living = setup.model.peft_config["default"]
    as_it_was = copy.copy(vars(living))
    save_model.save_model(setup, tmp_path)
    assert vars(living) == as_it_was
    fresh, _ = trained(name, {"lora_rank": 4, **config}, steps=0)
    fresh.close()
    base = save_model.merged(fresh.model)
    plain = logits(base, setup.workload)
    read = PeftModel.from_pretrained(base, tmp_path)
    held = dict(read.named_parameters())
    adapters = {name: value for name, value in setup.trainable() if "lora_" in name}
    assert adapters
    assert all(
        torch.equal(held[f"base_model.model.{name}"], value) for name, value in adapters.items()
    )
    wanted = trained_logits(setup)
    assert distance(logits(read, setup.workload), wanted) < tolerance(config)
    assert distance(plain, wanted) > 5 * tolerance(config)  # which the adapter makes up for


def test_the_adapter_file_holds_no_frozen_weight(tmp_path: Path) -> None:
    setup, _ = trained("llama, tied", {"lora_rank": 4, "lora_targets": "all-linear+head"})
    save_model.save_model(setup, tmp_path)
    names = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert all("lora_" in name for name in names)
    assert any("lm_head" in name for name in names)


def test_peft_finds_the_class_of_the_task_and_the_base_by_the_adapter_alone(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    workload = WORKLOADS["llama"]
    torch.manual_seed(0)
    workload.model().save_pretrained(tmp_path / "base")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    setup = build(
        workload, {"lora_rank": 4}, tiny.CPU, model=base, hyperparameters=Hyperparameters(lr=2e-2)
    )
    for _ in range(2):
        train_step(setup, workload.batch(4))
    save_model.save_model(setup, tmp_path / "adapter")
    read = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(read, workload), logits(setup.model, workload))


def test_a_head_that_was_trained_whole_is_saved_with_its_adapter(tmp_path: Path) -> None:
    setup, before = trained("classifier", {"lora_rank": 4})
    save_model.save_model(setup, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["classifier"]
    assert config["task_type"] == "SEQ_CLS"
    kept = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    head = kept["base_model.model.classifier.weight"]
    assert torch.equal(head, setup.model.classifier.weight)
    assert not torch.equal(head, before["classifier.weight"])


# Where it is written.


def test_files_of_others_stay_and_a_former_model_is_replaced(tmp_path: Path) -> None:
    setup, _ = trained("llama", {})
    (tmp_path / "tokenizer.json").write_text("mine")
    save_model.save_model(setup, tmp_path)
    first = (tmp_path / "model.safetensors").read_bytes()
    train_step(setup, setup.workload.batch(4))
    save_model.save_model(setup, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() != first
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, _ = trained("llama", {})
    monkeypatch.setattr(atomic_writes, "free_bytes", lambda _: 1000)
    with pytest.raises(
        InputError,
        match=r"there is no room for the trained model in .*: it needs 0\.001\d* GiB, and",
    ):
        save_model.save_model(setup, tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())


# Without adapters.


@pytest.mark.parametrize(("name", "config"), ADAPTERS, ids=str)
def test_a_merged_model_is_a_plain_one_with_the_same_outputs(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    """And its own library reads it back, with nothing of peft or bitsandbytes in it."""
    # Of the size that the tolerance is for: with an alpha of 32 steps change outputs much more.
    setup, _ = trained(name, {"lora_rank": 4, "lora_alpha": 8, **config})
    wanted = trained_logits(setup)
    setup.close()
    held = {key: value.clone() for key, value in setup.model.state_dict().items()}
    plain = save_model.merged(setup.model)
    assert type(plain) is type(setup.model)
    assert [*dict(plain.named_modules())] == [*dict(setup.workload.model().named_modules())]
    kinds = [type(module) for module in setup.workload.model().modules()]
    assert [type(module) for module in plain.modules()] == kinds
    assert distance(logits(plain, setup.workload), wanted) < tolerance(config)
    assert all(torch.equal(value, held[key]) for key, value in setup.model.state_dict().items())
    assert any(hasattr(module, "lora_A") for module in setup.model.modules())
    plain.save_pretrained(tmp_path)
    read = type(plain).from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(logits(read, setup.workload), logits(plain, setup.workload))


def test_quantised_layers_without_an_adapter_become_plain_too() -> None:
    setup, _ = trained(
        "llama", {"lora_rank": 4, "lora_targets": "attention", "quantization": "nf4"}
    )
    assert any(map(is_quantised, setup.model.modules()))
    wanted = trained_logits(setup)
    setup.close()
    plain = save_model.merged(setup.model)
    assert not any(map(is_quantised, plain.modules()))
    assert distance(logits(plain, setup.workload), wanted) < 1e-5


def test_an_update_that_is_smaller_than_a_step_of_the_quantised_format_is_kept() -> None:
    """peft's own merge of quantised layers rounds the sum to the format again."""
    setup, _ = trained("llama", {"lora_rank": 4, "quantization": "nf4"})
    wanted = trained_logits(setup)
    setup.close()
    plain = save_model.merged(setup.model)
    with pytest.warns(UserWarning, match="rounding errors"):
        for module in setup.model.modules():
            if hasattr(module, "lora_A"):
                module.merge()
    assert (
        distance(logits(plain, setup.workload), wanted)
        < distance(logits(setup.model, setup.workload), wanted) / 100
    )


def test_embeddings_that_a_head_was_tied_to_are_left_alone() -> None:
    setup, before = trained("llama, tied", {"lora_rank": 4, "lora_targets": "all-linear+head"})
    plain = save_model.merged(setup.model)
    embeddings = plain.get_input_embeddings().weight
    assert torch.equal(embeddings, before["model.embed_tokens.weight"])
    assert not torch.equal(plain.get_output_embeddings().weight, embeddings)
    assert not plain.config.tie_word_embeddings
    assert setup.model.config.tie_word_embeddings


def test_a_model_without_adapters_is_copied_as_it_is() -> None:
    model = tiny.MLP()
    plain = save_model.merged(model)
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert not {id(parameter) for parameter in plain.parameters()} & {
        id(parameter) for parameter in model.parameters()
    }


def test_encoders_of_pytorch_itself() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential()
    model.encoder = nn.TransformerEncoder(layer, 2)
    model.out = nn.Sequential(nn.Flatten(), nn.Linear(4 * 32, 10))
    features, classes = torch.randn(4, 4, 32), torch.arange(4)
    workload = Workload(
        model=lambda: model,
        batch=lambda n: (features[:n], classes[:n]),
        loss=tiny.classify,
        effective_batch_size=4,
    )
    setup = build(
        workload, {"lora_rank": 4}, tiny.CPU, model=model, hyperparameters=Hyperparameters(lr=2e-2)
    )
    train_step(setup, workload.batch(4))
    plain = save_model.merged(model)
    assert not any(hasattr(module, "lora_A") for module in plain.modules())
    torch.testing.assert_close(plain.eval()(features), model.eval()(features))
