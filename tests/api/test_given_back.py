"""After `fit` and `search` the user's model is as it was but for what it learnt: config, modes, hooks, attributes."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autofit.api.search import search
from autofit.techniques import compile as compiling
from tests import tiny
from tests.api.fitting import NARROW, StoppedError, fitted, stop_at
from tests.training.test_build import hooks_of, own_attributes


def model() -> nn.Module:
    """A Llama that was used before: with a cache, checkpointing and hooks, and modes and frozen weights of its own."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in tiny.LLAMA.items() if name != "model_type"}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    made.activation_checkpointing_enable()
    made.model.layers[0].eval()
    made.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    made.model.embed_tokens.weight.requires_grad_(False)
    return made


def snapshot(model: Any) -> dict[str, Any]:
    """All that hangs on a model beside the values of its weights."""
    forwards = {
        name: getattr(each.forward, "__func__", each.forward)
        for name, each in model.named_modules()
    }
    parameters = {
        name: (each.requires_grad, each.dtype, each.grad is None, len(each._backward_hooks or ()))
        for name, each in model.named_parameters()
    }
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "attention": model.config._attn_implementation,
        "modes": {name: each.training for name, each in model.named_modules()},
        "checkpointing": {
            name: getattr(each, "gradient_checkpointing", None)
            for name, each in model.named_modules()
        },
        "hooks": hooks_of(model),
        "attributes": own_attributes(model),
        "classes": [type(each) for each in model.modules()],
        "forwards": forwards,
        "parameters": parameters,
        "buffers": {name: (each.dtype, each.device) for name, each in model.named_buffers()},
    }


def loader() -> list[Any]:
    return [dict(tiny.llama_workload().batch(4)) for _ in range(2)]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"attention": "eager", "micro_batch_size": 2},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"loss": "chunked"},
        {"optimizer_in_backward": True},
        {"optimizer": "adafactor"},
        {"head_only": True},
        {"compile": "default"},
    ],
    ids=str,
)
def test_fit_gives_the_model_back(knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # what is compiled is captured as ever, but runs as captured
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    own = model()
    before = snapshot(own)
    fitted(own, loader(), loss=None, config=knobs)
    assert snapshot(own) == before


def test_and_when_training_ends_early() -> None:
    own = model()
    before = snapshot(own)
    with pytest.raises(StoppedError):
        fitted(
            own,
            loader(),
            loss=None,
            config={"activation_checkpointing": "full"},
            callbacks=(stop_at(0),),
        )
    after = snapshot(own)
    assert after == before


def test_adapters_are_added_and_nothing_else_changes() -> None:
    own = model()
    before = snapshot(own)
    fitted(own, loader(), loss=None, config={"lora_rank": 2, "activation_checkpointing": "full"})
    after = snapshot(own)
    for part in ("config", "generation", "attention"):
        assert after[part] == before[part]
    for name, mode in before["modes"].items():
        assert after["modes"].get(f"{name}.base_layer", after["modes"][name]) == mode
    assert before["checkpointing"].items() <= after["checkpointing"].items()


@pytest.mark.usefixtures("shared_zygote")
@pytest.mark.usefixtures("predicting_zygote")
def test_a_search_does_not_touch_it(tmp_path: Any) -> None:
    own = model()
    before = snapshot(own)
    weights = {name: each.clone() for name, each in own.state_dict().items()}
    knobs = {
        **NARROW,
        "micro_batch_size": (2, 4),
        "activation_checkpointing": "full",
        "attention": "eager",
    }
    search(
        own,
        loader(),
        device="cpu",
        mem=1,
        trials=1,
        fast=True,
        set=knobs,
        out=tmp_path / "run",
        store=False,
    )
    assert snapshot(own) == before
    assert all(torch.equal(each, weights[name]) for name, each in own.state_dict().items())
