"""Scripts that never hold the logits of all tokens compute the loss that the model itself would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.fragments import Case
from autofit.export.knobs.loss import PLAIN_HEADS, loss
from autofit.techniques.loss import chunk_rows
from tests.export.emitted import check_same_steps, model_of, module_of, saved_weights, setup_for

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
CUDA = {"hardware": {"device": "cuda", "name": "x", "budget_gib": 8.0}}
CHUNKED = {"loss": "chunked"}
Emit = Callable[..., str]
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What their configs do to the logits, set so that it shows in the loss.
FINISHED = {
    "gemma2": {"final_logit_softcapping": 0.2},
    "gemma3_text": {"final_logit_softcapping": 0.2},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 4.0},
    "cohere2": {"logit_scale": 4.0},
}


def small(kind: str, architectures: dict[str, Any]) -> dict[str, Any]:
    """A tiny architecture of that kind."""
    if kind == "gpt2":
        return architectures["gpt2"]  # type: ignore[no-any-return]
    return {"model_type": kind, **SMALL, **FINISHED.get(kind, {})}


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        ("causal-lm", {**LORA, "precision": "fp16-mixed", "optimizer": "adamw-foreach"}),
        ("gpt2", {**LORA}),
    ],
)
def test_chunks_train_as_autofits_chunks_do(
    emit: Emit, architectures: dict[str, Any], tmp_path: Path, kind: str, knobs: dict[str, Any]
) -> None:
    architecture = architectures[kind]
    weights = saved_weights("causal-lm", architecture, tmp_path)
    setup = setup_for("causal-lm", architecture, {**CHUNKED, **knobs}, weights)
    text = emit("causal-lm", {"model_config": architecture}, **dict(setup.config))
    check_same_steps(module_of(text), setup, weights, rel=1e-3 if "precision" in knobs else 1e-4)


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        *((kind, {}) for kind in sorted(PLAIN_HEADS)),
        *((kind, LORA) for kind in ("gemma2", "granite", "cohere", "gpt2")),
        *((kind, {**LORA, "lora_targets": "all-linear+head"}) for kind in ("gemma2", "cohere2")),
    ],
)
def test_loss_and_gradients_are_the_models_own(
    emit: Emit, architectures: dict[str, Any], kind: str, knobs: dict[str, Any]
) -> None:
    architecture = small(kind, architectures)
    # with what config.json leaves to defaults
    full = transformers.AutoConfig.for_model(**architecture).to_dict()
    script = module_of(emit("causal-lm", {"model_config": full}, **CHUNKED, **knobs))
    script.CHUNK_TOKENS = 24  # 192 tokens: none is left over; 7 rows of chunks
    model = model_of(script).eval()
    ids = torch.randint(256, (3, 64), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, 20:40] = -100
    batch = {"input_ids": ids, "labels": labels}
    losses, gradients = [], []
    for compute in (lambda: model(**batch).loss, lambda: script.causal_loss(model, batch)):
        value = compute()
        value.backward()
        losses.append(value.item())
        gradients.append(
            {
                name: each.grad.clone()
                for name, each in model.named_parameters()
                if each.requires_grad
            }
        )
        model.zero_grad()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_the_logits_of_all_tokens_never_exist(emit: Emit, architectures: dict[str, Any]) -> None:
    wide = {**architectures["causal-lm"], "vocab_size": 4096}
    script = module_of(emit("causal-lm", {"model_config": wide}, **CHUNKED))
    model = model_of(script)
    ids = torch.randint(4096, (8, 64))
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        script.causal_loss(model, {"input_ids": ids, "labels": ids}).backward()
    shapes = {
        tuple(shape) for each in profile.events() for shape in each.input_shapes if len(shape) == 2
    }
    assert (64, 4096) in shapes  # a chunk's
    assert not {shape for shape in shapes if shape[-1] == 4096 and shape[0] > 64}


@pytest.mark.parametrize(
    ("tokens", "features", "vocabulary"),
    [
        (512, 64, 256),
        (8192, 4096, 128_256),
        (16_384, 2048, 32_000),
        (64, 64, 50_257),
        (4096, 8192, 4096),
    ],
)
def test_chunks_are_as_large_as_those_that_were_measured(
    tokens: int, features: int, vocabulary: int
) -> None:
    model = {"model_type": "llama", "hidden_size": features, "vocab_size": vocabulary}
    case = Case(Config(CHUNKED), CAUSAL_LM, "cuda", tokens // 32, 32, model)
    fragments = loss(case)
    assert fragments
    assert fragments.constants[0].startswith(
        f"CHUNK_TOKENS = {chunk_rows(tokens, features, vocabulary)} "
    )


@pytest.mark.parametrize(
    ("kind", "knobs", "expected"),
    [
        ("llama", {}, ["hidden, model.get_output_embeddings().weight, labels,"]),
        ("llama", LORA, ["model = model.get_base_model()"]),
        ("gemma2", {}, ["softcap=0.2,"]),
        ("granite", {}, ["hidden / 8.0,"]),
        ("cohere", {}, ["hidden * 4.0,"]),
    ],
)
def test_fused_is_ligers_kernel(
    emit: Emit, kind: str, knobs: dict[str, Any], expected: list[str]
) -> None:
    text = emit("causal-lm", {**CUDA, "model_config": small(kind, {})}, loss="fused", **knobs)
    compile(text, "emitted", "exec")
    called = text[text.index("def causal_loss") : text.index("def build_model")]
    assert "total = liger_fused_linear_cross_entropy(" in called
    assert all(part in called for part in expected)
    assert "liger-kernel" in text


def test_models_whose_head_is_more_than_a_product_are_refused(emit: Emit) -> None:
    for others in ({"model_type": "phi", **SMALL}, {"model_type": "bert", **SMALL}):
        with pytest.raises(InputError, match="cannot express loss chunked"):
            emit("causal-lm", {"model_config": others}, **CHUNKED)
    with pytest.raises(InputError, match="cannot express loss fused"):
        emit(others=CUDA, loss="fused", **{**LORA, "lora_targets": "all-linear+head"})
