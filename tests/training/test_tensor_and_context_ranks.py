"""Split layers and split tokens learn what one device learns: three steps of uneven labels, clipped, losses compared.

The cases of a number of ranks run one after the other in the same processes: starting them takes longer than training.
"""

import dataclasses
import functools
import traceback
from typing import Any

import pytest
import torch

from autofit.core.errors import AutofitError
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.training.build import build
from autofit.training.local_batch import LocalBatch
from autofit.training.step import accumulate, loss_value, update
from tests.ranks import on_ranks
from tests.tiny import CPU, GPT2
from tests.tolerances import LOSS, LOSS_OF_16_BITS_IN_LARGE_STEPS
from tests.training.test_several_ranks import BATCH, RATE, STEPS, batch_of, returned

TOKENS = 15  # which two ranks cannot divide evenly
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 2),
    "num_attention_heads": 4,
    "head_dim": 8,
    "pad_token_id": 3,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"model_type": "llama", "attention_bias": True},
    "qwen3": SMALL | {"model_type": "qwen3"},  # with norms of single heads
    "tied": SMALL | {"model_type": "llama", "tie_word_embeddings": True, "pad_token_id": None},
    "padding": SMALL | {"model_type": "llama", "tie_word_embeddings": True},
    "windows": SMALL | {"model_type": "mistral", "sliding_window": 5},
    "4 kv": SMALL | {"model_type": "llama", "num_key_value_heads": 4},
    "1 kv": SMALL | {"model_type": "llama", "num_key_value_heads": 1},
    "dropout": SMALL | {"model_type": "phi", "resid_pdrop": 0.1},
    "gpt2": GPT2 | {"n_head": 4},
    "mamba": {
        "model_type": "mamba",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
    },
    "activations": SMALL | {"model_type": "apertus"},  # whose parameters are among split layers
    "functions": SMALL | {"model_type": "seed_oss", "residual_dropout": 0.1},
    "scaled": SMALL
    | {"model_type": "gemma"},  # whose embedding is tied, and scales what it looks up
    "gathered": SMALL | {"model_type": "phi3"},  # whose fused projections are put together again
    "no norms": SMALL | {"model_type": "olmo"},  # with weights, so that no weight is whole
    "latent": SMALL
    | {"model_type": "deepseek_v2", "first_k_dense_replace": 2}
    | dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8
    ),
    "own code": SMALL
    # whose attention has a weight outside of layers
    | {"model_type": "doge", "keep_window_size": 64},
    "deep": SMALL | {"model_type": "llama", "num_hidden_layers": 5, "tie_word_embeddings": True},
    "mixture": SMALL | {"model_type": "mixtral", "num_local_experts": 2},
}
TENSOR, CONTEXT, FSDP = {"tensor_parallel": 2}, {"context_parallel": 2}, {"data_parallel": "fsdp"}
SLICED, IN_BACKWARD = {"micro_batch_size": 3}, {"optimizer_in_backward": True}
CHUNKED = {"loss": "chunked", "micro_batch_size": 3}
CHECKPOINTED, MIXED = {"activation_checkpointing": "full"}, {"precision": "bf16-mixed"}
LORA = {"lora_rank": 4}
Case = tuple[str, str]

LEARNS: dict[int, dict[Case, dict[str, Any]]] = {
    2: {
        ("llama", "tensor"): TENSOR,
        ("qwen3", "tensor"): TENSOR,
        ("tied", "tensor"): TENSOR,
        ("padding", "tensor"): TENSOR | SLICED,
        ("scaled", "tensor"): TENSOR,
        ("gathered", "tensor"): TENSOR,
        ("no norms", "tensor"): TENSOR,
        ("mixture", "tensor"): TENSOR,
        ("llama", "tensor, chunked"): TENSOR | CHUNKED | CHECKPOINTED,
        ("qwen3", "tensor, mixed"): TENSOR | MIXED,
        ("qwen3", "tensor, in backward"): TENSOR | IN_BACKWARD,
        ("llama", "context"): CONTEXT,
        ("qwen3", "context"): CONTEXT,
        ("windows", "context"): CONTEXT,
        ("qwen3", "context, chunked"): CONTEXT | CHUNKED | CHECKPOINTED,
        ("llama", "context, mixed"): CONTEXT | MIXED,
        ("llama", "context, adapters"): CONTEXT | LORA,
        ("mixture", "context"): CONTEXT,
    },
    4: {
        ("llama", "tensor and shards"): TENSOR | FSDP,
        ("qwen3", "tensor and shards"): TENSOR | FSDP | SLICED,
        ("tied", "tensor and replicas"): TENSOR | FSDP | {"data_parallel_replicate": 2},
        ("llama", "tensor, offloaded"): TENSOR | {"fsdp_offload": "cpu"},
        ("llama", "tensor, 8 bits"): TENSOR | {"optimizer": "adamw-8bit"},
        ("llama", "context and shards"): CONTEXT | {"reshard_after_forward": 2},
        ("qwen3", "context and shards"): CONTEXT | SLICED | {"reshard_after_forward": False},
        ("4 kv", "context and tensor"): CONTEXT | TENSOR,
    },
}
REFUSED: dict[Case, tuple[dict[str, Any], str]] = {
    ("gpt2", "tensor"): (
        TENSOR,
        "no plan to split the layers of GPT2LMHeadModel; use tensor_parallel 1",
    ),
    ("1 kv", "tensor"): (
        TENSOR,
        "1 and 4 heads cannot be divided among 2 devices; choose a divisor",
    ),
    ("dropout", "tensor"): (TENSOR, "would drop something else; set dropout to 0"),
    ("functions", "tensor"): (TENSOR, "would drop something else; set dropout to 0"),
    ("activations", "tensor"): (
        TENSOR,
        "gradients of model.layers.0.mlp.act_fn.alpha_p differ between devices",
    ),
    ("activations", "tensor, in backward"): (
        TENSOR | IN_BACKWARD,
        "gradients of model.layers.0.mlp.act_fn.alpha_p differ",
    ),
    ("own code", "tensor"): (
        TENSOR,
        "the code of DogeForCausalLM does not follow the plan that transformers has for it",
    ),
    ("latent", "tensor"): (
        TENSOR,
        "the plan of DeepseekV2ForCausalLM asks for mla_kv_a_proj of a Linear",
    ),
    ("llama", "tensor and adapters"): (
        TENSOR | {"lora_rank": 4},
        "adapters of split layers drift apart",
    ),
    ("llama", "tensor and ddp"): (TENSOR | {"data_parallel": "ddp"}, "use fsdp"),
    ("1 kv", "context"): (CONTEXT, "1 and 4 heads cannot be divided among 2 devices"),
    ("mamba", "context"): (CONTEXT, "use context_parallel 1"),
    ("llama", "eager context"): (CONTEXT | {"attention": "eager"}, "use sdpa"),
}


def workload_of(name: str) -> Workload:
    config = MODELS[name]
    model = HuggingFaceModel("tiny", "causal-lm", config, {"kind": "directory", "path": "tiny"})
    return huggingface_workload(model, sequence_length=TOKENS, effective_batch_size=BATCH)


def losses(name: str, knobs: dict[str, Any], world: int) -> tuple[list[float], ...]:
    """Of each step; of one sample after the first step, and the last norm of gradients."""
    workload, clip = workload_of(name), "optimizer_in_backward" not in knobs
    learning = Hyperparameters(lr=RATE, max_grad_norm=1.0 if clip else None)
    setup = build(
        workload, knobs, dataclasses.replace(CPU, devices=world), hyperparameters=learning
    )
    found, beside = [], []
    for step in range(STEPS):
        own, counts = own_samples(
            batch_of(workload, step), setup.ranks.dp_rank, setup.ranks.layout.dp_degree
        )
        found.append(float(accumulate(setup, LocalBatch(own, counts))))
        assert update(setup)
        if step == 0:
            with torch.no_grad():
                # a forward without a backward
                beside.append(loss_value(setup, batch_of(workload, 0, 1)))
    setup.close()
    assert all(type(each.data) is torch.Tensor for each in setup.model.parameters()), (
        "not put together"
    )
    return found, [*beside, float(setup.progress.gradient_norm)] if clip else beside


def every(cases: list[tuple[str, dict[str, Any]]], world: int) -> list[Any]:
    """The losses of each case, or why it is refused."""

    def of(name: str, knobs: dict[str, Any]) -> Any:
        try:
            return losses(name, knobs, world)
        except AutofitError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()

    return [of(*case) for case in cases]


@functools.cache
def found(world: int) -> dict[Case, list[Any]]:
    """What each rank finds, by case."""
    cases = {case: (case[0], knobs) for case, knobs in LEARNS[world].items()}
    if world == 2:
        cases |= {case: (case[0], knobs) for case, (knobs, _) in REFUSED.items()}
    answers = on_ranks(world, every, list(cases.values()), world)
    return dict(zip(cases, map(list, zip(*answers, strict=True)), strict=True))


def on_one_device(learns: dict[int, dict[Case, dict[str, Any]]]) -> dict[Case, Any]:
    """What one device finds in cases of several, without the knobs that only these have."""
    kept = (
        "micro_batch_size",
        "loss",
        "precision",
        "lora_rank",
        "optimizer",
        "optimizer_in_backward",
    )
    cases = {
        case: (case[0], {name: value for name, value in knobs.items() if name in kept})
        for of_world in learns.values()
        for case, knobs in of_world.items()
    }
    (answers,) = on_ranks(1, every, list(cases.values()), 1)
    return dict(zip(cases, answers, strict=True))


@functools.cache
def alone() -> dict[Case, Any]:
    return on_one_device(LEARNS)


def assert_learnt_alike(case: Case, answers: list[Any], expected: Any) -> None:
    """Each rank has found the losses and norms of one device."""
    tolerance = LOSS_OF_16_BITS_IN_LARGE_STEPS if "mixed" in case[1] else LOSS
    losses_alone, beside = expected
    for answer in answers:
        assert type(answer) is tuple, answer
        assert answer[0] == pytest.approx(losses_alone, abs=tolerance, rel=0)
        assert answer[1] == pytest.approx(beside, abs=5 * tolerance, rel=0)  # a norm, too


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in LEARNS.items() for case in cases]
)
def test_it_learns_what_one_device_learns(world: int, case: Case) -> None:
    assert_learnt_alike(case, found(world)[case], alone()[case])


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_learn_something_else_is_refused(case: Case) -> None:
    _, reason = REFUSED[case]
    for answer in found(2)[case]:
        assert reason in answer


@pytest.mark.parametrize("knobs", [TENSOR, CONTEXT], ids=["tensor", "context"])
def test_a_model_comes_back_as_it_was_but_trained(knobs: dict[str, Any]) -> None:
    for answers in on_ranks(2, returned, knobs):
        assert answers == (True,) * 6
