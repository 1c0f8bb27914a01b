"""precision: what is searched on which hardware, what is refused, and which inputs follow the weights."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.errors import RefusedError
from autofit.core.workload import Workload
from autofit.hardware.device import detect
from autofit.hardware.tracker import StorageTracker
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.loss import loss_and_count
from autofit.training.step import accumulate, train_step
from autofit.training.user_model import dtypes_to_restore
from tests import tiny
from tests.techniques.contract import Effect, built, dtypes_of

PRECISION = technique_named("precision")
AMPERE = replace(tiny.CPU, device="cuda", name="an A100", capability=(8, 0))
HOPPER = replace(AMPERE, name="an H100", capability=(9, 0))
TURING = replace(tiny.CPU, device="cuda", name="a T4", capability=(7, 5))


def test_what_is_searched_depends_on_the_hardware() -> None:
    assert PRECISION.choices(tiny.CPU) == ("fp32", "bf16", "bf16-mixed")
    assert PRECISION.choices(TURING) == ("fp32", "fp16-mixed")
    assert PRECISION.choices(AMPERE) == ("fp32", "tf32", "bf16", "bf16-mixed", "fp16-mixed")
    assert PRECISION.choices(HOPPER) == PRECISION.values


@pytest.mark.parametrize(
    ("keeps", "here", "on_a_card"),
    [
        ((("float32",), ()), ["fp32", "bf16-mixed"], ["fp32", "tf32", "bf16-mixed", "fp16-mixed"]),
        (
            (("float32",), ("float32",)),
            ["fp32", "bf16-mixed"],
            ["fp32", "tf32", "bf16-mixed", "fp16-mixed"],
        ),
        (((), ("float32",)), ["fp32", "bf16-mixed"], ["fp32", "tf32", "bf16-mixed", "fp16-mixed"]),
        ((("bfloat16",), ()), ["bf16"], ["bf16", "fp8"]),
        ((("float32",), ("bfloat16",)), ["bf16-mixed"], ["bf16-mixed"]),
        (((), ("bfloat16",)), ["bf16", "bf16-mixed"], ["bf16", "bf16-mixed", "fp8"]),
        # What no value keeps is held in what loses nothing of it, as far as there is such a format.
        ((("float16",), ()), ["fp32", "bf16-mixed"], ["fp32", "tf32", "bf16-mixed", "fp16-mixed"]),
        (
            (("bfloat16", "float32"), ()),
            ["fp32", "bf16-mixed"],
            ["fp32", "tf32", "bf16-mixed", "fp16-mixed"],
        ),
        ((("float64",), ()), ["fp32"], ["fp32", "tf32"]),
        (((), ()), ["fp32", "bf16", "bf16-mixed"], list(PRECISION.values)),
    ],
    ids=str,
)
def test_weights_that_are_to_come_back_as_they_came(
    keeps: Any, here: list[str], on_a_card: list[str]
) -> None:
    workload = replace(tiny.mlp_workload(), keeps=keeps)
    assert list(PRECISION.choices_for(workload, tiny.CPU)) == here
    assert list(PRECISION.choices_for(workload, HOPPER)) == on_a_card


@pytest.mark.parametrize(("again", "held"), [("none", 5.0), ("full", 0.5)])
def test_autocast_holds_copies_of_checkpointed_weights_one_at_a_time(
    again: str, held: float
) -> None:
    """In the forward of five blocks of two matrices; a backward makes them anew."""
    width, depth = 256, 5
    workload = replace(
        tiny.mlp_workload(4), model=lambda: tiny.MLP(width, depth), batch=partial(of_width, width)
    )
    setup = build(
        workload, {"precision": "bf16-mixed", "activation_checkpointing": again}, tiny.CPU
    )
    batch = workload.batch(4)
    with StorageTracker() as tracker, setup.step_context(), setup.forward_context():
        tracker.see([batch, *setup.model.parameters()])
        before = tracker.live
        tracker.reset_peak()
        loss, _ = loss_and_count(setup, batch)
        block = 2 * 2 * width * 2 * width  # bytes of its two matrices in bf16
        assert (tracker.peak - before) / block == pytest.approx(held, abs=0.2)
    loss.backward()


def of_width(width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(count, width), torch.zeros(count, dtype=torch.long)


def test_a_bf16_model_on_a_card_without_bf16_is_held_in_fp32() -> None:
    workload = replace(tiny.mlp_workload(), keeps=(("bfloat16",), ()))
    assert PRECISION.choices_for(workload, TURING) == ("fp32", "fp16-mixed")


def test_weights_held_in_another_format_meanwhile_are_told_of() -> None:
    def warned(precision: str, *trained: str) -> list[str]:
        return build(
            replace(tiny.mlp_workload(), keeps=(trained, ())), {"precision": precision}, tiny.CPU
        ).warnings

    assert warned("fp32", "float16") == [
        "weights in float16 are trained in another format and rounded back at the end."
    ]
    assert warned("fp32", "float32") == []


@pytest.mark.parametrize("value", ["bf16", "bf16-mixed"])
def test_bf16_is_refused_where_there_are_no_units_for_it(value: str) -> None:
    workload = tiny.transformer_workload()
    config = canonicalize({"precision": value}, workload, TURING)
    assert refuse(config, workload, TURING) == (
        f"precision: {value} needs compute capability 8.0, a T4 has 7.5; use fp16-mixed or fp32."
    )
    assert refuse(config, workload, AMPERE) is None
    assert refuse(config, workload, tiny.CPU) is None
    assert refuse(config.replace(precision="fp16-mixed"), workload, TURING) is None


def test_full_training_in_bf16_is_warned_of_and_lora_is_not() -> None:
    workload = tiny.transformer_workload()
    (warning,) = build(workload, {"precision": "bf16"}, tiny.CPU).warnings
    assert "bf16-mixed" in warning
    assert not build(workload, {"precision": "bf16", "lora_rank": 4}, tiny.CPU).warnings


def test_statistics_follow_the_weights_they_stand_beside() -> None:
    setup = build(tiny.conv_workload(), {"precision": "bf16"}, tiny.CPU)
    floats = {buffer.dtype for buffer in setup.model.buffers() if buffer.is_floating_point()}
    assert floats == {torch.bfloat16}
    assert accumulate(setup, setup.workload.batch(4)).isfinite()


class TakesADictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(inputs["ids"].dtype)
        return self.linear(inputs["x"]).mean()


def test_floating_inputs_follow_the_weights_also_inside_containers() -> None:
    workload = Workload(
        model=TakesADictionary,
        batch=lambda n: {"x": torch.ones(n, 6), "ids": torch.ones(n, dtype=torch.int64)},
        loss=lambda model, batch: model(batch),
        effective_batch_size=2,
    )
    setup = build(workload, {"precision": "bf16"}, tiny.CPU)
    assert accumulate(setup, workload.batch(2)).isfinite()
    assert setup.model.seen == [torch.int64]
    setup.close()
    with pytest.raises(RuntimeError, match="dtype"):
        setup.model({"x": torch.ones(2, 6), "ids": torch.ones(2)})


@pytest.mark.parametrize("knobs", [{"lora_rank": 4}, {}], ids=["lora", "frozen-by-the-user"])
def test_frozen_norms_in_a_low_format_take_what_enters_a_mixed_model(knobs: dict) -> None:
    def factory() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        layer.norm1.requires_grad_(False)
        return layer

    workload = Workload(
        model=factory,
        batch=lambda n: {"x": torch.randn(n, 5, 16)},
        loss=lambda model, batch: model(batch["x"]).float().pow(2).mean(),
        effective_batch_size=4,
    )
    setup = build(workload, {"precision": "bf16-mixed", **knobs}, tiny.CPU)
    assert accumulate(setup, workload.batch(4)).isfinite()


def test_a_living_model_that_comes_back_in_two_formats_is_warned_of_and_the_remedies_work() -> None:
    workload = tiny.transformer_workload()
    config = {"precision": "bf16-mixed", "lora_rank": 4}
    model = tiny.Transformer()
    setup = build(workload, config, tiny.CPU, model=model)
    (warning,) = setup.warnings
    assert (
        'run it under torch.autocast("cpu", torch.bfloat16), or cast it with model.to(torch.bfloat16)'
        in warning
    )
    setup.close()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**workload.batch(2)).isfinite()
    assert model.to(torch.bfloat16)(**workload.batch(2)).isfinite()
    assert not build(workload, config, tiny.CPU).warnings  # nobody is given a probe's model
    assert not build(
        workload, {"precision": "bf16-mixed"}, tiny.CPU, model=tiny.Transformer()
    ).warnings


@pytest.mark.parametrize("knobs", [{"lora_rank": 4}, {}], ids=str)
def test_frozen_weights_that_are_to_come_back_in_fp32_are_never_rounded(
    knobs: dict[str, Any],
) -> None:
    """Autocast computes with copies in bf16, as of trained weights; without `keeps` they are stored in bf16."""

    def partly_frozen() -> nn.Module:
        model = tiny.Transformer()
        model.embed.requires_grad_(False)
        return model

    model = partly_frozen()
    frozen = dict(model.named_parameters()) if knobs else {"embed.weight": model.embed.weight}
    before = {name: value.detach().clone() for name, value in frozen.items()}
    workload = replace(tiny.transformer_workload(), keeps=dtypes_to_restore(model, knobs))
    setup = build(workload, {"precision": "bf16-mixed", **knobs}, tiny.CPU, model=model)
    train_step(setup, workload.batch(4))
    assert not setup.warnings
    assert all(torch.equal(value, before[name]) for name, value in frozen.items())
    assert dtypes_of(model.parameters()) == {torch.float32}
    setup.close()
    low = build(
        replace(workload, keeps=None, model=partly_frozen),
        {"precision": "bf16-mixed", **knobs},
        tiny.CPU,
    )
    assert torch.bfloat16 in dtypes_of(low.model.parameters())


def test_a_model_in_double_precision_comes_with_its_inputs() -> None:
    workload = Workload(
        model=lambda: nn.Linear(3, 1).double(),
        batch=lambda n: {"x": torch.randn(n, 3, dtype=torch.float64)},
        loss=lambda model, batch: model(batch["x"]).mean(),
        effective_batch_size=4,
    )
    setup = build(workload, {}, tiny.CPU)
    assert accumulate(setup, workload.batch(4)).isfinite()
    assert setup.warnings == ["the model's float64 weights are trained in float32."]


def shows(effect: Effect) -> None:
    low = torch.float16 if effect.value == "fp16-mixed" else torch.bfloat16
    mixed = effect.value.endswith("-mixed")
    assert dtypes_of(effect.setup.model.parameters()) == {torch.float32 if mixed else low}
    # some transformers rotate by a bmm in float32
    products = ("aten.mm", "aten.addmm", "scaled_dot_product_flash")
    assert effect.trace.dtypes(*products) == {low}
    assert effect.off_trace.dtypes(*products) == {torch.float32}
    assert effect.trace.loss != effect.off_trace.loss
    assert (effect.setup.scaler is not None) == (effect.value == "fp16-mixed")
    if effect.value != "fp16-mixed":  # whose first steps are skipped
        states = {
            state.dtype
            for each in effect.setup.optimizer.state.values()
            for state in each.values()
            if state.dim()
        }
        assert states == {torch.float32 if mixed else low}
    adapted = built(effect.setup.workload, {"precision": effect.value, "lora_rank": 4})
    assert dtypes_of(p for p in adapted.model.parameters() if not p.requires_grad) == {low}
    assert dtypes_of(p for p in adapted.model.parameters() if p.requires_grad) == {
        torch.float32 if mixed else low
    }


def reason(value: str, hardware: object, **knobs: object) -> str | None:
    workload = replace(tiny.llama_workload(), sequence_length=16)
    return refuse(
        canonicalize({"precision": value, **knobs}, workload, hardware), workload, hardware
    )


def test_tf32_and_fp8_need_the_units_for_it() -> None:
    assert (
        reason("fp8", AMPERE)
        == "precision: fp8 needs compute capability 8.9, an A100 has 8.0; use bf16."
    )
    assert "tf32 needs compute capability 8.0" in reason("tf32", TURING)
    assert reason("tf32", AMPERE) is None
    assert reason("fp8", HOPPER) is None


def test_fp8_needs_a_multiple_of_16_tokens() -> None:
    workload = replace(tiny.llama_workload(), sequence_length=10)
    config = canonicalize({"precision": "fp8", "micro_batch_size": 2}, workload, HOPPER)
    assert "a multiple of 16 tokens in a micro-batch, not 20; choose another" in refuse(
        config, workload, HOPPER
    )


def roundings() -> dict[str, Any]:
    """How products of fp32 numbers are rounded, by all of PyTorch's switches."""
    backends = torch.backends
    kinds = {
        "matmul": backends.cuda.matmul,
        "convolution": backends.cudnn.conv,
        "recurrent": backends.cudnn.rnn,
    }
    found = {name: kind.fp32_precision for name, kind in kinds.items()}
    older = {
        "older": torch.get_float32_matmul_precision(),
        "older convolution": backends.cudnn.allow_tf32,
    }
    return {**found, "of a CPU": backends.mkldnn.matmul.fp32_precision, **older}


def set_rounding(of_matmul: str, of_convolutions: bool) -> None:
    torch.set_float32_matmul_precision(of_matmul)
    torch.backends.cudnn.allow_tf32 = of_convolutions


@pytest.fixture
def rounding_kept() -> Iterator[None]:
    """PyTorch's own switches, whatever builds that nobody closed have left."""
    set_rounding("highest", True)
    yield
    set_rounding("highest", True)


@pytest.mark.usefixtures("rounding_kept")
@pytest.mark.parametrize("own", ["highest", "high", "medium"])
@pytest.mark.parametrize(("value", "rounding"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_fp32_products_are_rounded_as_the_value_says_while_the_run_lasts(
    value: str, rounding: str, own: str
) -> None:
    torch.set_float32_matmul_precision(own)
    before = roundings()
    setup = build(tiny.llama_workload(), {"precision": "bf16"}, tiny.CPU)
    assert roundings() == before
    PRECISION.apply(setup, value)
    while_it_lasts = roundings()  # which would raise where two switches contradict each other
    assert {
        while_it_lasts[kind] for kind in ("matmul", "convolution", "recurrent", "of a CPU")
    } == {rounding}
    assert while_it_lasts["older"] == ("high" if value == "tf32" else "highest")
    assert while_it_lasts["older convolution"] is (value == "tf32")
    setup.close()
    assert roundings() == before


@pytest.mark.usefixtures("rounding_kept")
def test_switches_that_contradict_each_other_are_given_back_as_they_were() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError, match="cuDNN"):
        roundings()
    setup = build(tiny.conv_workload(), {"precision": "fp32"}, tiny.CPU)
    assert roundings()["recurrent"] == "ieee"
    setup.close()
    assert (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision) == (
        "ieee",
        "tf32",
    )


@pytest.mark.gpu
def test_fp32_convolves_in_fp32() -> None:
    hardware = detect("cuda")
    images, weights = (
        torch.randn(4, 64, 32, 32, device="cuda"),
        torch.randn(64, 64, 3, 3, device="cuda"),
    )
    exact = nn.functional.conv2d(images.double(), weights.double())
    errors = {}
    for value in ("fp32", "tf32"):
        with contextlib.closing(build(tiny.conv_workload(), {"precision": value}, hardware)):
            errors[value] = float((nn.functional.conv2d(images, weights) - exact).abs().max())
    assert errors["fp32"] < errors["tf32"] / 10


@pytest.fixture
def fp8_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has kernels for fp8 products, slow ones: good enough to see what is multiplied in which format."""
    monkeypatch.setattr(type(PRECISION), "refuse", lambda *_: None)


@pytest.mark.usefixtures("fp8_on_the_cpu")
@pytest.mark.parametrize("rank", [0, 4])
def test_fp8_multiplies_all_but_the_head_in_fp8(rank: int) -> None:
    from torchao.float8.float8_linear import Float8Linear

    workload, losses = tiny.llama_workload(), {}
    for value in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = workload.model()
        plain = dict(model.named_modules())
        setup = build(workload, {"precision": value, "lora_rank": rank}, tiny.CPU, model=model)
        losses[value] = [float(train_step(setup, workload.batch(4))) for _ in range(2)]
        layers = [each for each in model.modules() if isinstance(each, Float8Linear)]
        assert len(layers) == (14 if value == "fp8" else 0)
        assert not isinstance(model.lm_head, Float8Linear)
        setup.close()
        assert not any(isinstance(each, Float8Linear) for each in model.modules())
        if not rank:
            assert all(module is plain[name] for name, module in model.named_modules())
        else:
            assert any("lora_A" in name for name, _ in model.named_parameters())
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.01)


@pytest.mark.usefixtures("fp8_on_the_cpu")
@pytest.mark.parametrize("length", [16, 13])
def test_fp8_takes_batches_of_any_length(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """CUDA's products want inner sizes by sixteen, and that of a weight's gradient is the number of tokens."""
    workload, losses, inner = tiny.llama_workload(), {}, []
    product = torch._scaled_mm

    def seen(left: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        inner.append(left.shape[1])
        return product(left, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", seen)
    batch = {name: tensor[:3, :length] for name, tensor in workload.batch(4).items()}
    for value in ("bf16", "fp8"):
        torch.manual_seed(0)
        setup = build(workload, {"precision": value}, tiny.CPU, model=workload.model())
        losses[value] = [float(train_step(setup, batch)) for _ in range(2)]
        setup.close()
    assert len(inner) == 2 * 3 * 14
    assert not any(size % 16 for size in inner)
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.01)


@pytest.mark.usefixtures("fp8_on_the_cpu")
def test_fp8_is_refused_where_no_layer_has_the_shape() -> None:
    workload = replace(tiny.mlp_workload(), model=lambda: tiny.MLP(width=12))
    with pytest.raises(RefusedError, match="no linear layer has both sizes a multiple of 16"):
        build(workload, {"precision": "fp8"}, tiny.CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["tf32", "fp8"])
def test_on_a_gpu_the_products_are_rounded(value: str) -> None:
    hardware = detect("cuda")
    workload, losses = tiny.llama_workload(), {}
    for each in ("fp32", "bf16", value):
        torch.manual_seed(0)
        with contextlib.closing(
            build(workload, {"precision": each}, hardware, model=workload.model())
        ) as setup:
            losses[each] = [float(train_step(setup, workload.batch(4))) for _ in range(2)]
    assert losses[value] not in (losses["fp32"], losses["bf16"])
    assert losses[value] == pytest.approx(losses["fp32"], rel=0.02)
