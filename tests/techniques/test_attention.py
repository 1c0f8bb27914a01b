"""attention: models that name their implementation, models that call PyTorch's, and models without any."""

from dataclasses import replace

import pytest
import tiny
import torch
from contract import Effect
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.core.errors import RefusedError
from autofit.core.workload import Traits
from autofit.techniques import settle
from autofit.training.build import build
from autofit.training.loop import accumulate

TRAITS = Traits(parameters=1, blocks=2, linears=1, attention=False, sdpa=True, batch_norm=False, dropout=False)


def test_without_fused_attention_in_the_model_there_is_nothing_to_choose() -> None:
    workload = replace(tiny.mlp_workload(), traits=replace(TRAITS, sdpa=False))
    assert settle({"attention": "eager"}, workload, tiny.CPU)["attention"] == "sdpa"
    workload = replace(workload, traits=TRAITS)
    assert settle({"attention": "eager"}, workload, tiny.CPU)["attention"] == "eager"


def test_a_transformers_model_gets_its_implementation_back() -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    assert model.config._attn_implementation == "sdpa"
    setup = build(workload, {"attention": "eager"}, tiny.CPU, model=model)
    assert model.config._attn_implementation == "eager"
    setup.close()
    assert model.config._attn_implementation == "sdpa"


def test_an_implementation_the_model_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(_: str) -> None:
        raise ValueError("only sdpa here")

    workload = tiny.llama_workload()
    model = workload.model()
    monkeypatch.setattr(model, "set_attn_implementation", no)
    with pytest.raises(RefusedError, match="this model has no eager attention: only sdpa here"):
        build(workload, {"attention": "eager"}, tiny.CPU, model=model)


def test_a_plain_module_goes_on_with_the_callers_own_choice_afterwards() -> None:
    setup = build(tiny.transformer_workload(), {"attention": "eager"}, tiny.CPU)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        accumulate(setup, setup.workload.batch(4))
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


def test_a_checkpointed_block_takes_the_same_path_again() -> None:
    """The choice must hold in the backward too, or what is computed again has other intermediate results."""
    both = {"attention": "eager", "activation_checkpointing": "full"}
    setup = build(tiny.transformer_workload(), both, tiny.CPU)
    assert accumulate(setup, setup.workload.batch(4)).isfinite()


def shows(effect: Effect) -> None:
    assert effect.off_trace.ran("scaled_dot_product")
    assert not effect.trace.ran("scaled_dot_product")
    assert effect.trace.ran("softmax")
