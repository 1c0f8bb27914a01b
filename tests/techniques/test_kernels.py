"""kernels: which functions of Liger are called and how, that all they change is changed back, and what they compute."""

import contextlib
import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

from autofit.core.errors import RefusedError
from autofit.hardware.device import detect
from autofit.setup import Setup
from autofit.techniques import canonicalize, technique_named
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny
from tests.techniques.contract import Effect

LIGER = {"kernels": "liger"}
CUDA = replace(tiny.CPU, device="cuda")


def swiglu(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """What Liger's kernel computes, whatever activation the model was made with."""
    return mlp.down_proj(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


class StandIn:
    """Patches a Llama in every way in which Liger patches models, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, model: Any, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True
    ) -> None:
        self.calls.append(
            {
                "cross_entropy": cross_entropy,
                "fused_linear_cross_entropy": fused_linear_cross_entropy,
            }
        )
        self.patch(model)

    def patch(self, model: Any) -> None:
        modeling_llama.apply_rotary_pos_emb = (
            lambda *args, inner=modeling_llama.apply_rotary_pos_emb, **more: inner(*args, **more)
        )
        modeling_llama.LlamaRMSNorm = type("LigerRMSNorm", (nn.Module,), {})
        modeling_llama.LlamaAttention.extra_repr = lambda self: "patched"
        model.model.norm.variance_epsilon = 1e-6 * 2 / 2
        for layer in model.model.layers:
            layer.mlp.__dict__["forward"] = swiglu.__get__(layer.mlp)
            layer.input_layernorm.offset = 0.0
            layer.mlp.act_fn = copy.deepcopy(layer.mlp.act_fn)


class Idle(StandIn):
    """A function of Liger's that does nothing to this model."""

    def patch(self, model: Any) -> None:
        pass


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandIn], StandIn]:
    """Puts a module in the place of Liger's, with this function for Llamas, and lets it run on the CPU."""

    def install(stand_in: StandIn) -> StandIn:
        patches = ModuleType("liger_kernel.transformers.monkey_patch")
        patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": stand_in}
        for name in ("liger_kernel", "liger_kernel.transformers"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, patches.__name__, patches)
        monkeypatch.setattr("autofit.techniques.kernels.Kernels.refuse", lambda *_: None)
        return stand_in

    return install


def everything(model: nn.Module) -> list[Any]:
    """All that the stand-in changes, as it is now."""
    modules = [(dict(vars(module)), dict(module._modules)) for module in model.modules()]
    return [modules, dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaAttention))]


def same(one: list[Any], other: list[Any]) -> bool:
    """By identity of the values, for tensors and functions have no other."""

    def names(each: Any) -> Any:
        return {key: id(value) for key, value in each.items()}

    return all(
        names(a) == names(b) and names(c) == names(d)
        for (a, c), (b, d) in zip(one[0], other[0], strict=True)
    ) and [names(each) for each in one[1:]] == [names(each) for each in other[1:]]


def test_its_own_losses_stay_off_and_the_rest_as_liger_has_it(
    liger: Callable[[StandIn], StandIn],
) -> None:
    stand_in = liger(StandIn())
    with contextlib.closing(build(tiny.llama_workload(), LIGER, tiny.CPU)) as setup:
        assert stand_in.calls == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
        assert train_step(setup, setup.workload.batch(4)).isfinite()


def test_a_function_without_losses_to_switch_off_is_called_without(
    liger: Callable[[StandIn], StandIn],
) -> None:
    class Encoder(StandIn):
        def __call__(self, model: Any) -> None:
            self.patch(model)

    liger(Encoder())
    build(tiny.llama_workload(), LIGER, tiny.CPU).close()


@pytest.mark.parametrize(
    "beside", [{}, {"activation_checkpointing": "full", "loss": "chunked"}, {"lora_rank": 4}]
)
def test_all_that_was_patched_is_taken_back(
    liger: Callable[[StandIn], StandIn], beside: dict[str, Any]
) -> None:
    liger(StandIn())
    workload = tiny.llama_workload()
    model = workload.model()
    if "lora_rank" in beside:  # adapters stay in a model that is given back
        build(workload, beside, tiny.CPU, model=model).close()
        beside = {}
    before = everything(model)
    setup = build(workload, LIGER | beside, tiny.CPU, model=model)
    assert not same(everything(model), before)
    assert repr(model.model.layers[0].self_attn).count("patched") == 1
    train_step(setup, workload.batch(4))
    setup.close()
    after = everything(model)
    assert same([after[0][1:], *after[1:]], [before[0][1:], *before[1:]])
    assert "patched" not in repr(model)


def test_models_that_liger_does_not_know_are_refused(liger: Callable[[StandIn], StandIn]) -> None:
    liger(StandIn())
    with pytest.raises(RefusedError, match="no kernels for models of type None; use none"):
        build(tiny.transformer_workload(), LIGER, tiny.CPU)


def test_a_function_that_does_nothing_is_refused(liger: Callable[[StandIn], StandIn]) -> None:
    liger(Idle())
    with pytest.raises(RefusedError, match="changed nothing about this model; use none"):
        build(tiny.llama_workload(), LIGER, tiny.CPU)


def test_a_module_that_computes_something_else_is_refused(
    liger: Callable[[StandIn], StandIn],
) -> None:
    """Liger binds SwiGLU to an MLP whatever activation its config names."""
    liger(StandIn())
    workload = tiny.llama_workload(hidden_act="relu")
    model = workload.model()
    before = everything(model)
    with pytest.raises(
        RefusedError, match=r"liger's LlamaMLP differs from the model's own by .* use none"
    ):
        build(workload, LIGER, tiny.CPU, model=model)
    assert same([everything(model)[0][1:], *everything(model)[1:]], [before[0][1:], *before[1:]])


def test_a_function_that_computes_something_else_is_refused(
    liger: Callable[[StandIn], StandIn],
) -> None:
    class Wrong(StandIn):
        def patch(self, model: Any) -> None:
            super().patch(model)
            modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, **_: (q * 3, -k)

    liger(Wrong())
    workload = tiny.llama_workload()
    torch.manual_seed(0)
    model = workload.model()
    for parameter in model.parameters():
        parameter.data.mul_(10)  # or the attention of such a model hardly matters to its loss
    before = everything(model)
    with pytest.raises(
        RefusedError, match=r"with liger's kernels the loss is .* instead of .*; use none"
    ):
        build(workload, LIGER, tiny.CPU, model=model)
    assert same([everything(model)[0][1:], *everything(model)[1:]], [before[0][1:], *before[1:]])


def test_a_liger_that_does_not_go_with_transformers_is_refused(
    liger: Callable[[StandIn], StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    liger(StandIn())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(RefusedError, match="cannot be imported with this version of transformers"):
        build(tiny.llama_workload(), LIGER, tiny.CPU)


def test_it_needs_cuda_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    technique, workload = technique_named("kernels"), tiny.llama_workload()
    config = canonicalize(LIGER, workload, tiny.CPU)
    assert technique.refuse(config, workload, tiny.CPU).endswith("CUDA only; use none.")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install liger-kernel" in technique.refuse(config, workload, CUDA)
    # to plan it need not be installed
    assert technique.refuse(config, workload, replace(CUDA, here=False)) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert technique.refuse(config, workload, CUDA) is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert technique.refuse(config, workload, CUDA).startswith(
        "liger compiles its kernels: Triton needs a C compiler"
    )
    assert technique.refuse(config, workload, replace(CUDA, here=False)) is None
    assert technique.choices(tiny.CPU) == ("none",)
    assert technique.choices(CUDA) == ("none", "liger")
    assert technique.package("liger") == "liger-kernel"


def test_under_fake_tensors_stand_ins_take_their_place_and_are_taken_back() -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    setup = build(workload, {}, tiny.CPU, model=model)
    before = everything(model)
    technique_named("kernels").trace(setup, "liger")
    assert not same(everything(model), before)
    setup.close()
    after = everything(model)
    assert same([after[0][1:], *after[1:]], [before[0][1:], *before[1:]])
    assert "forward" not in vars(model.model.norm)


def shows(effect: Effect) -> None:
    """Only where CUDA is: on the CPU the value is refused."""
    assert patched(effect.setup)
    assert not patched(effect.off)


def patched(setup: Setup) -> list[str]:
    """The modules whose forward is one of Liger's."""
    return [
        name
        for name, module in setup.model.named_modules()
        if "liger" in getattr(vars(module).get("forward"), "__module__", "")
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize(
    "beside", [{}, {"activation_checkpointing": "full", "loss": "chunked"}], ids=str
)
def test_on_a_gpu_it_trains_as_the_model_does_without(
    precision: str, beside: dict[str, Any]
) -> None:
    pytest.importorskip(
        "liger_kernel", reason="liger-kernel is not installed: pip install -e '.[triton]'"
    )
    hardware = detect("cuda")
    workload, losses = tiny.llama_workload(), {}
    for value in ("none", "liger"):
        torch.manual_seed(0)
        model = workload.model()
        knobs = {"kernels": value, "precision": precision, **beside}
        with contextlib.closing(build(workload, knobs, hardware, model=model)) as setup:
            names = patched(setup)
            losses[value] = [float(train_step(setup, workload.batch(4))) for _ in range(3)]
        assert not patched(setup)
    # 2 norms and an MLP in each of the 2 layers, and the last norm
    assert len(names) == 7
    assert losses["liger"] == pytest.approx(
        losses["none"], rel=1e-3 if precision == "fp32" else 1e-2
    )
