"""Adapters that users make themselves are saved, merged and resumed as autofit's own are."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn
from transformers import AutoModelForCausalLM

from autofit.core.errors import InputError
from autofit.core.workload import Hyperparameters, Workload
from autofit.setup import Setup
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.save_model import merged, save_model
from autofit.training.step import train_step
from tests import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Model has `tie_word_embeddings=True` and the tied weights:UserWarning"
    ),
]
LLAMA = tiny.llama_workload()
TIED = tiny.llama_workload(tie_word_embeddings=True)
MIXTURE = tiny.mixture_workload("qwen3_moe")


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    )


def wrapped(config: Any) -> Callable[[Any], Any]:
    return lambda model: get_peft_model(model, config)


def by_transformers(model: Any) -> Any:
    model.add_adapter(lora(), adapter_name="mine")
    return model


def by_injection(model: Any) -> Any:
    return inject_adapter_in_model(lora(task_type=None), model)


def two_adapters(model: Any) -> Any:
    both = get_peft_model(model, lora(), adapter_name="first")
    both.add_adapter("second", lora(r=2))
    both.set_adapter("second")
    return both


def norm_beside(model: Any) -> Any:
    model = get_peft_model(model, lora())
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


EXPERTS = lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
MADE: dict[str, tuple[Workload, Callable[[Any], Any]]] = {
    "LoRA": (LLAMA, wrapped(lora())),
    "without a task": (LLAMA, wrapped(lora(task_type=None))),
    "DoRA": (LLAMA, wrapped(lora(use_dora=True))),
    "a head trained whole": (LLAMA, wrapped(lora(modules_to_save=["lm_head"]))),
    "a tied head trained whole": (TIED, wrapped(lora(modules_to_save=["lm_head"]))),
    "tied embeddings with an adapter": (
        TIED,
        wrapped(lora(target_modules=["embed_tokens", "q_proj"])),
    ),
    "rows of tokens": (TIED, wrapped(lora(trainable_token_indices={"embed_tokens": [3, 5]}))),
    "biases": (
        tiny.gpt2_workload(),
        wrapped(lora(target_modules=["c_attn"], bias="all", fan_in_fan_out=True)),
    ),
    "experts": (MIXTURE, wrapped(EXPERTS)),
    "IA3": (
        LLAMA,
        wrapped(
            IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
        ),
    ),
    "a norm trained beside": (LLAMA, norm_beside),
    "two adapters": (LLAMA, two_adapters),
    "add_adapter": (LLAMA, by_transformers),
    "inject_adapter_in_model": (LLAMA, by_injection),
}


def made(kind: str) -> tuple[nn.Module, Any]:
    """A model, and a copy of it as the user has wrapped it."""
    workload, wrap = MADE[kind]
    torch.manual_seed(0)
    base = workload.model()
    return base, wrap(copy.deepcopy(base))


def trained(kind: str, steps: int = 3) -> tuple[nn.Module, Setup]:
    workload, _ = MADE[kind]
    base, model = made(kind)
    setup = build(workload, {}, tiny.CPU, model=model, hyperparameters=Hyperparameters(lr=2e-2))
    for _ in range(steps):
        train_step(setup, workload.batch(4))
    return base, setup


@torch.no_grad()
def logits(model: Any, workload: Workload) -> torch.Tensor:
    return model.eval()(**workload.batch(2)).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MADE)
def test_what_a_user_trains_is_read_by_peft_and_merged(tmp_path: Path, kind: str) -> None:
    base, setup = trained(kind)
    setup.close()
    workload, model = setup.workload, setup.model
    checkpoint.check_savable(setup)
    wanted, before = logits(model, workload), logits(base, workload)
    assert (wanted - before).abs().max() > 0.01 * before.std()  # what is to be kept

    save_model(setup, tmp_path / "adapter")
    read = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    torch.testing.assert_close(logits(read, workload), wanted)

    plain = merged(model)
    assert type(plain) is type(base)
    assert [type(module) for module in plain.modules()] == [
        type(module) for module in base.modules()
    ]
    torch.testing.assert_close(logits(plain, workload), wanted, rtol=1e-4, atol=1e-5)
    plain.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again, workload), logits(plain, workload))
    torch.testing.assert_close(logits(model, workload), wanted)  # the user's own stays as it is


def test_adapters_that_are_not_in_use_are_saved_in_folders_of_their_names(tmp_path: Path) -> None:
    base, setup = trained("two adapters")
    save_model(setup, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
    first = PeftModel.from_pretrained(base, tmp_path / "first")
    assert first.peft_config["default"].r == 4
    assert not (tmp_path / "second").exists()
    setup.model.set_adapter("first")
    torch.testing.assert_close(logits(first, LLAMA), logits(setup.model, LLAMA))


def test_the_class_is_found_without_a_task(tmp_path: Path) -> None:
    base, setup = trained("without a task")
    base.save_pretrained(tmp_path / "base")
    setup.model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    object.__setattr__(setup.workload, "task", "custom")
    try:
        save_model(setup, tmp_path)
    finally:
        object.__setattr__(setup.workload, "task", "causal-lm")
    read = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(read, LLAMA), logits(setup.model, LLAMA))


@pytest.mark.parametrize("kind", ["LoRA", "a head trained whole", "add_adapter"])
def test_a_resumed_run_has_the_same_weights(tmp_path: Path, kind: str) -> None:
    _, setup = trained(kind)
    checkpoint.save(setup, tmp_path, 3)
    _, fresh = trained(kind, steps=0)
    assert checkpoint.load(fresh, tmp_path).next_step == 3
    wanted, found = dict(setup.trained_values()), dict(fresh.trained_values())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_adapters_of_an_earlier_fit_are_saved_as_adapters_when_they_are_trained_on(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = LLAMA.model()
    base = copy.deepcopy(model)
    build(LLAMA, {"lora_rank": 4}, tiny.CPU, model=model).close()
    setup = build(LLAMA, {}, tiny.CPU, model=model, hyperparameters=Hyperparameters(lr=2e-2))
    train_step(setup, LLAMA.batch(4))
    save_model(setup, tmp_path)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, tmp_path), LLAMA), logits(model, LLAMA)
    )


def test_learned_prompts_are_saved_and_never_lost_in_a_merge(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = LLAMA.model()
    config = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), config)
    setup = build(LLAMA, {}, tiny.CPU, model=model, hyperparameters=Hyperparameters(lr=2e-2))
    train_step(setup, LLAMA.batch(4))
    save_model(setup, tmp_path)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, tmp_path), LLAMA), logits(model, LLAMA)
    )
    with pytest.raises(
        InputError, match="PROMPT_TUNING learns prompts, which are no part of any weight"
    ):
        merged(model)


def test_disabled_adapters_are_no_part_of_a_merged_model() -> None:
    base, setup = trained("LoRA")
    setup.model.base_model.disable_adapter_layers()
    assert torch.equal(logits(merged(setup.model), LLAMA), logits(base, LLAMA))


def test_what_the_file_of_adapters_cannot_hold_is_refused_before_training() -> None:
    _, model = made("LoRA")
    weight = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    weight.requires_grad_(True)
    setup = build(LLAMA, {}, tiny.CPU, model=model)
    with pytest.raises(
        InputError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight is trained beside adapters"
    ):
        checkpoint.check_savable(setup)


def test_a_bf16_model_without_adapters_is_copied_in_its_format() -> None:
    assert {value.dtype for value in merged(tiny.MLP().bfloat16()).parameters()} == {torch.bfloat16}


def test_files_hold_nothing_of_the_frozen_base(tmp_path: Path) -> None:
    _, setup = trained("LoRA")
    save_model(setup, tmp_path)
    names = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert names
    assert all("lora_" in name for name in names)
