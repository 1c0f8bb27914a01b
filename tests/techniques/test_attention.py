"""attention: models that name their implementation, models that call PyTorch's, and models without any."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from autofit.core.errors import RefusedError
from autofit.core.workload import Traits, Workload
from autofit.setup import Setup
from autofit.techniques import attention, canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.step import accumulate
from tests import tiny
from tests.techniques.contract import Effect

TRAITS = Traits(
    parameters=1, blocks=2, linears=1, attention=False, sdpa=True, batch_norm=False, dropout=False
)


def test_without_fused_attention_in_the_model_there_is_nothing_to_choose() -> None:
    workload = replace(tiny.mlp_workload(), traits=replace(TRAITS, sdpa=False))
    assert canonicalize({"attention": "eager"}, workload, tiny.CPU)["attention"] is None
    assert build(workload, {"attention": "eager"}, tiny.CPU).config["attention"] is None
    workload = replace(workload, traits=TRAITS)
    assert canonicalize({"attention": "eager"}, workload, tiny.CPU)["attention"] == "eager"


def test_a_transformers_model_gets_its_implementation_back() -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    assert model.config._attn_implementation == "sdpa"
    setup = build(workload, {"attention": "eager"}, tiny.CPU, model=model)
    assert model.config._attn_implementation == "eager"
    setup.close()
    assert model.config._attn_implementation == "sdpa"


def test_an_implementation_the_model_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("knobs", [{}, {"attention": "eager"}])
def test_where_shapes_vary_cudnn_which_plans_for_each_is_left_out(
    allowed: bool, knobs: dict[str, str]
) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        steady = tiny.llama_workload()
        for workload in (steady, replace(steady, varying=True)):
            setup = build(workload, knobs, tiny.CPU)
            left_out = workload.varying and not knobs
            assert torch.backends.cuda.cudnn_sdp_enabled() is (allowed and not left_out)
            assert accumulate(setup, workload.batch(2)).isfinite()
            setup.close()
            assert torch.backends.cuda.cudnn_sdp_enabled() is allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


CUDA = replace(tiny.CPU, device="cuda", name="a card", capability=(8, 0))


@pytest.mark.parametrize(
    ("capability", "precision", "reason"),
    [
        ((8, 0), "bf16", None),
        ((9, 0), "fp16-mixed", None),
        ((7, 5), "fp16-mixed", "flash needs compute capability 8.0, a card has 7.5; use sdpa."),
        (
            (8, 0),
            "fp32",
            "flash computes in 16 bits only, not in fp32; set precision bf16 or bf16-mixed.",
        ),
    ],
)
def test_what_flash_needs_of_a_card(
    capability: tuple[int, int], precision: str, reason: str | None
) -> None:
    workload, card = tiny.llama_workload(), replace(CUDA, capability=capability)
    config = canonicalize({"attention": "flash", "precision": precision}, workload, card)
    assert refuse(config, workload, card) == (reason and f"attention: {reason}")
    assert "flash" in technique_named("attention").choices(card)
    assert "flash" not in technique_named("attention").choices(tiny.CPU)


def flash(workload: Workload) -> Setup:
    """A run on the CPU with what `flash` does elsewhere: the CPU has a flash kernel too, which takes no dropout."""
    setup = build(workload, {}, tiny.CPU)
    technique_named("attention").apply(setup, "flash")
    return setup


@pytest.mark.parametrize(
    "workload", [tiny.llama_workload(), tiny.transformer_workload()], ids=["llama", "plain"]
)
def test_without_flash_attn_pytorchs_own_flash_kernel_is_the_only_one_allowed(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: False)
    setup = flash(workload)
    with setup.step_context():
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
    with profile(acc_events=True) as seen:
        assert accumulate(setup, workload.batch(4)).isfinite()
    names = {event.key for event in seen.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names
    setup.close()


@pytest.mark.filterwarnings(
    "ignore:Flash attention kernel not used", "ignore:Both fused kernels do not support"
)
def test_what_the_flash_kernel_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *qkv, **more: original(*qkv, **more, dropout_p=0.5),
    )
    setup = flash(tiny.transformer_workload())
    with pytest.raises(
        RefusedError, match=r"flash kernel does not support .* Use attention sdpa\.$"
    ):
        accumulate(setup, setup.workload.batch(4))


def test_other_errors_of_a_step_stay_what_they_are() -> None:
    setup = flash(tiny.transformer_workload())
    with pytest.raises(RuntimeError, match="something else"), setup.step_context():
        raise RuntimeError("something else")


def test_with_flash_attn_a_transformers_model_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: True)
    workload, told = tiny.llama_workload(), []
    model = workload.model()
    monkeypatch.setattr(model, "set_attn_implementation", told.append)
    setup = build(workload, {}, tiny.CPU, model=model)
    technique_named("attention").apply(setup, "flash")
    setup.close()
    assert told == ["flash_attention_2", "sdpa"]
    assert technique_named("attention").package("flash") == "flash-attn"
    assert technique_named("attention").package("eager") == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "workload", [tiny.llama_workload(), tiny.transformer_workload()], ids=["llama", "plain"]
)
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_on_a_gpu_only_the_flash_kernel_runs(workload: Workload, precision: str) -> None:
    setup = build(
        workload, {"attention": "flash", "precision": precision}, replace(tiny.CPU, device="cuda")
    )
    with profile(acc_events=True) as seen:
        assert accumulate(setup, workload.batch(4)).isfinite()
    names = " ".join(event.key for event in seen.key_averages())
    assert "flash" in names
    assert "efficient_attention" not in names
    assert "_scaled_dot_product_attention_math" not in names
    assert (
        importlib.util.find_spec("flash_attn")
        or "aten::_scaled_dot_product_flash_attention_backward" in names
    )
    setup.close()


def shows(effect: Effect) -> None:
    assert effect.off_trace.ran("scaled_dot_product")
    assert not effect.trace.ran("scaled_dot_product")
    assert effect.trace.ran("softmax")
