"""flash on a card: refused where PyTorch's kernel takes no mask, flash-attn's own behaviour where that is there."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from autofit.core.errors import RefusedError
from autofit.core.workload import Workload
from autofit.estimate.estimator import predict
from autofit.setup import flash_attn
from autofit.techniques import attention, technique_named
from autofit.training.build import build
from tests.estimate.traced import AMPERE, peak, traced
from tests.tiny import CPU, llama, llama_workload

ELSEWHERE = replace(AMPERE, here=False)
WINDOW = {"model_type": "mistral", "sliding_window": 16, "num_key_value_heads": 1}
FLASH = {"attention": "flash", "precision": "bf16"}


def windowed(**changes: Any) -> Workload:
    """A model whose window is shorter than its samples, so that SDPA is given a mask."""
    return llama_workload(4, 64, **WINDOW, **changes)


def attention_in(workload: Workload, hardware: Any, **knobs: Any) -> set[str]:
    """The fused kernels of a step."""
    costs = traced(workload, hardware, **{"precision": "bf16", **knobs}).costs
    return {
        cost.name.removeprefix("aten::_scaled_dot_product_")
        for cost in costs
        if cost.kind == "attention"
    }


def test_without_flash_attn_a_mask_is_refused_as_the_run_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: False)
    with pytest.raises(
        RefusedError, match=r"^PyTorch's flash kernel does not support this model's attention"
    ):
        traced(windowed(), AMPERE, **FLASH)
    assert attention_in(windowed(), AMPERE) == {
        "efficient_attention",
        "efficient_attention_backward",
    }
    assert attention_in(llama_workload(), AMPERE, **FLASH) == {
        "flash_attention",
        "flash_attention_backward",
    }


def test_flash_attn_takes_the_window_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: True)
    assert attention_in(windowed(), AMPERE, **FLASH) == {
        "flash_attention",
        "flash_attention_backward",
    }
    plain = llama_workload(4, 64, num_key_value_heads=1)
    assert peak(traced(windowed(), AMPERE, **FLASH)) == peak(traced(plain, AMPERE, **FLASH))


def test_for_a_card_elsewhere_it_is_taken_to_be_installed_and_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: False)
    found = predict(windowed(), FLASH, ELSEWHERE)
    assert (
        found.notes[0] == "attention flash is that of flash-attn, which is to be installed there."
    )
    assert (
        found.allocated_bytes
        < predict(windowed(), {**FLASH, "attention": "sdpa"}, ELSEWHERE).allocated_bytes
    )


def test_what_is_not_in_a_model_of_transformers_is_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = build(llama_workload(), {}, CPU)
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: True)
    plain = replace(setup, model=torch.nn.Linear(1, 1), hardware=ELSEWHERE)
    technique_named("attention").trace(plain, "flash")
    assert not plain.tracing.assumptions
    without = build(llama_workload(), {}, CPU)
    assert len(plain.step_contexts) == len(without.step_contexts) + 1


def padded(samples: int) -> dict[str, torch.Tensor]:
    tokens = torch.ones(samples, 64, dtype=torch.int64)
    mask = tokens.clone()
    mask[:, 16:] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def test_tokens_that_are_padding_take_no_part_in_attention() -> None:
    workload = replace(llama_workload(4, 64), batch=padded)
    step = traced(workload, ELSEWHERE, **FLASH, micro_batch_size=2)
    (forward, *_) = (cost for cost in step.costs if cost.kind == "attention")
    assert forward.sizes[0] == 2 * 16 * 32 * 2  # samples, tokens, features, bytes


def test_a_model_that_has_no_such_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaPreTrainedModel._supports_flash_attn", False)
    with pytest.raises(
        RefusedError,
        match="this model has no flash_attention_2 attention: LlamaForCausalLM does not",
    ):
        traced(llama_workload(), ELSEWHERE, **FLASH)


def test_a_head_that_flash_attn_does_not_take_is_refused() -> None:
    wide = llama_workload(4, 16, hidden_size=512, num_attention_heads=1, num_key_value_heads=1)
    with pytest.raises(
        RefusedError, match="flash-attn's kernel does not support this model's attention; use sdpa"
    ):
        traced(wide, ELSEWHERE, **FLASH)


def test_values_of_another_size_are_filled_up_and_cut_again() -> None:
    module = torch.nn.Linear(1, 1)
    module.is_causal = True  # type: ignore[assignment]
    query, value = (
        torch.ones(2, 2, 8, 16, dtype=torch.bfloat16),
        torch.ones(2, 2, 8, 12, dtype=torch.bfloat16),
    )
    out, _ = flash_attn._attention(module, query, query, value, None)
    assert out.shape == (2, 8, 2, 12)
    torch.testing.assert_close(out, torch.ones_like(out))


def test_afterwards_transformers_is_what_it_was() -> None:
    model, before = llama()(), AttentionInterface._global_mapping["flash_attention_2"]
    with contextlib.closing(build(llama_workload(), {}, CPU, model=model)) as setup:
        flash_attn.stand_in_for_flash_attn(setup)
        assert model.config._attn_implementation == "flash_attention_2"
        assert AttentionInterface._global_mapping["flash_attention_2"] is flash_attn._attention
    assert model.config._attn_implementation == "sdpa"
    assert AttentionInterface._global_mapping["flash_attention_2"] is before
