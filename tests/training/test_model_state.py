"""Every step trains the model in one state, whatever the knobs, and the user gets the model back in their own."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from autofit.core.workload import Workload
from autofit.setup.layers import repeated_blocks
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.inspect import inspect_workload
from autofit.training.meta_model import meta_copy
from autofit.training.model_state import stays_in_eval
from autofit.training.step import accumulate, train_step
from tests import tiny

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
LENGTH = 6  # of a sample
CHECKPOINTING = ("none", "selective", "alternate", "full")


@functools.cache
def language_model(kind: str) -> nn.Module:
    """A model as transformers makes it: its config asks for a cache."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            # or attention is about even, and shows little of what it sees
            nn.init.normal_(weight, std=0.3)
    assert model.config.use_cache
    return model


def alone(samples: int) -> dict[str, torch.Tensor]:
    """Samples as rows of their own."""
    generator = torch.Generator().manual_seed(samples)
    ids = torch.randint(1, 64, (samples, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def packed(rows: int, samples: int, *, bounds: bool = False) -> dict[str, torch.Tensor]:
    """The same samples, several in a row. The first token of each is nobody's next one."""
    ids = alone(rows * samples)["input_ids"].view(rows, samples * LENGTH)
    positions = torch.arange(LENGTH).repeat(rows, samples)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }
    if bounds:  # as DataCollatorWithFlattening writes them
        starts = torch.arange(0, samples * LENGTH + 1, LENGTH, dtype=torch.int32)
        batch |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    return batch


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_packed_samples_never_see_one_another(
    kind: str, checkpointing: str, attention: str
) -> None:
    model = copy.deepcopy(language_model(kind))
    with torch.no_grad():
        right = model(**alone(6)).loss
        mixed = model(**packed(2, 3)).loss
    assert abs(mixed - right) > 1e-3, "with a cache they do"
    forms = (packed(2, 3), 2), (packed(1, 6), 6), (packed(1, 6, bounds=True), 6)
    for batch, samples in forms:
        for micro_batch_size in {1, samples}:
            workload = Workload(
                lambda: model,
                lambda n, batch=batch: batch,
                effective_batch_size=samples,
                task="causal-lm",
            )
            knobs = {"activation_checkpointing": checkpointing, "attention": attention}
            setup = build(
                workload, {**knobs, "micro_batch_size": micro_batch_size}, tiny.CPU, model=model
            )
            torch.testing.assert_close(accumulate(setup, batch), right)
            assert evaluate(setup, [batch]) == pytest.approx(float(right), rel=1e-5)
            setup.close()
            assert model.config.use_cache


def test_the_configs_inside_a_config_cache_nothing_either() -> None:
    text = transformers.LlamaConfig(**SIZES)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4),
    )
    model = transformers.LlavaForConditionalGeneration(config)
    before = copy.deepcopy(model.config.to_dict())
    assert model.config.text_config.use_cache
    setup = build(tiny.llama_workload(), {}, tiny.CPU, model=model)
    assert not model.config.text_config.use_cache
    setup.close()
    assert model.config.to_dict() == before


def normalised() -> nn.Module:
    """A network that learns beside a part whose statistics are to stay as they are."""
    model = tiny.ConvNet()
    model.blocks[1].eval()
    return model


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [block.norm.running_mean.clone() for block in model.blocks]


@pytest.mark.parametrize(
    "make", [normalised, lambda: meta_copy(normalised())], ids=["living", "in a probe"]
)
def test_a_part_in_eval_mode_stays_so(make: Callable[[], nn.Module]) -> None:
    model = make()
    workload = replace(tiny.conv_workload(), model=lambda: model)
    setup = build(workload, {}, tiny.CPU)
    before = statistics(setup.model)
    train_step(setup, workload.batch(4))
    evaluate(setup, [workload.batch(4)])
    train_step(setup, workload.batch(4))
    moved = [not torch.equal(*pair) for pair in zip(statistics(setup.model), before, strict=True)]
    assert moved == [True, False, True]
    modes = [setup.model.training, *(block.norm.training for block in setup.model.blocks)]
    assert modes == [True, True, False, True]
    (said,) = setup.warnings
    assert said.startswith("blocks.1: given in eval mode in a model in train mode, and stays so")


def test_a_model_in_eval_mode_is_trained_in_train_mode_altogether_and_given_back() -> None:
    model = tiny.ConvNet().eval()
    model.fc.train()
    given = [module.training for module in model.modules()]
    setup = build(tiny.conv_workload(), {}, tiny.CPU, model=model)
    assert all(module.training for module in model.modules())
    assert setup.warnings == []
    setup.close()
    assert [module.training for module in model.modules()] == given


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_of_a_model_that_peft_wrapped_the_model_inside_decides() -> None:
    import peft

    inner = tiny.llama_workload().model().eval()  # as from_pretrained gives it
    model = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"]))
    assert model.training and not inner.training
    assert stays_in_eval(model) == []
    inner.train()
    inner.model.layers[0].eval()
    assert stays_in_eval(model) == ["base_model.model.model.layers.0"]


class KeepsItsNorms(tiny.ConvNet):
    """As detectors are written: `train` leaves the statistics alone."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for block in self.blocks:
            block.norm.eval()
        return self


def test_what_a_class_keeps_in_eval_mode_by_itself_stays_so() -> None:
    workload = replace(tiny.conv_workload(), model=KeepsItsNorms)
    setup = build(workload, {}, tiny.CPU)
    before = statistics(setup.model)
    train_step(setup, workload.batch(4))
    assert all(map(torch.equal, statistics(setup.model), before))


def test_frozen_statistics_neither_couple_a_batch_nor_warn() -> None:
    model = tiny.ConvNet()
    for block in model.blocks:
        block.eval()
    workload = replace(tiny.conv_workload(), model=lambda: meta_copy(model))
    assert not inspect_workload(workload, tiny.CPU, None).batch_norm
    assert inspect_workload(tiny.conv_workload(), tiny.CPU, None).batch_norm
    setup = build(workload, {"micro_batch_size": 1}, tiny.CPU)
    assert not any("BatchNorm" in each for each in setup.warnings)


def forwards_of_blocks(setup: Any, batch: Any) -> list[int]:
    """How often a step runs what is inside of each block."""
    counts = [0] * len(repeated_blocks(setup.model))
    handles = []
    for number, block in enumerate(repeated_blocks(setup.model)):

        def count(*_: Any, number: int = number) -> None:
            counts[number] += 1

        inside = next(module for module in block.modules() if isinstance(module, nn.Linear))
        handles.append(inside.register_forward_pre_hook(count))
    train_step(setup, batch)
    for handle in handles:
        handle.remove()
    return counts


def with_its_own() -> nn.Module:
    model = tiny.llama_workload().model()
    model.activation_checkpointing_enable()
    return model


def wrapped() -> nn.Module:
    model = tiny.llama_workload().model()
    model.model.layers = nn.ModuleList(map(checkpoint_wrapper, model.model.layers))
    return model


@pytest.mark.parametrize(
    ("value", "runs"), [("none", [1, 1]), ("alternate", [2, 1]), ("full", [2, 2])]
)
@pytest.mark.parametrize("make", [with_its_own, wrapped], ids=["transformers", "torch"])
def test_the_knob_alone_decides_what_is_computed_again(
    make: Callable[[], nn.Module], value: str, runs: list[int]
) -> None:
    model, workload = make(), tiny.llama_workload()
    setup = build(workload, {"activation_checkpointing": value}, tiny.CPU, model=model)
    assert forwards_of_blocks(setup, workload.batch(4)) == runs
    assert setup.warnings == [
        "the model came with activation checkpointing switched on: while it is trained here, the knob "
        "activation_checkpointing decides instead."
    ]
    setup.close()
    setup.model, setup.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
    assert forwards_of_blocks(setup, workload.batch(4)) == [2, 2], "as it came"
