"""quantization: which weights are held in how many bits, that building never holds all unquantised, beside what."""

import contextlib
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from autofit.core.errors import RefusedError
from autofit.core.workload import Hyperparameters, Traits, Workload
from autofit.estimate.trace import trace
from autofit.hardware.tracker import StorageTracker
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup.quantised_layers import dequantised
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.step import train_step
from tests import tiny
from tests.estimate.traced import AMPERE, peak, traced, tracked
from tests.techniques.contract import Effect, living

QUANTIZATION = technique_named("quantization")
CHANGES = QUANTIZATION.values[1:]
NO_LINEARS = Traits(
    parameters=1, blocks=0, linears=0, attention=False, sdpa=False, batch_norm=False, dropout=False
)
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
}
FALCON = {
    "model_type": "falcon",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
# rounding error, relative to the largest weight of a block
WORST = {"int8": 0.5 / 127, "nf4": 0.16, "nf4-dq": 0.17}


def beside(value):
    return {"lora_rank": 4}


def quantised(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that hold their weight in few bits, by the name they had."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    }


def held_bytes(layer: nn.Module) -> int:
    """Everything a layer keeps instead of its weight: the packed weight, its scales, and the codebook of scales."""
    if type(layer).__name__ == "Linear8bitLt":
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        return layer.weight.nbytes + scales.nbytes
    state = layer.weight.quant_state
    nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return layer.weight.nbytes + state.absmax.nbytes + sum(each.nbytes for each in nested)


def predicted_bytes(value: str, rows: int, columns: int) -> float:
    """From the papers: int8 has a scale a row, NF4 one for 64 weights, in 32 bits or in 8 with scales of their own."""
    weights = rows * columns
    if value == "int8":
        return weights + 4 * rows
    blocks = weights / 64
    return weights / 2 + (
        4 * blocks if value == "nf4" else blocks + 4 * (blocks / 256) + 4 * 256 + 4
    )


def shows(effect: Effect) -> None:
    before = living(effect.setup.workload)
    head = before.get_output_embeddings() if hasattr(before, "get_output_embeddings") else None
    expected = {
        n: m for n, m in before.named_modules() if isinstance(m, nn.Linear) and m is not head
    }
    layers = quantised(effect.setup.model)
    assert layers.keys() == expected.keys()
    for name, layer in layers.items():
        weight = expected[name].weight
        assert held_bytes(layer) == pytest.approx(
            predicted_bytes(effect.value, *weight.shape), rel=0.1
        ), name
        x = torch.randn(3, weight.shape[1])
        plain, seen = functional.linear(x, weight, expected[name].bias), layer.train()(x)
        assert not torch.equal(plain, seen)
        bound = WORST[effect.value] * weight.abs().max() * x.abs().sum(dim=1, keepdim=True)
        assert ((plain - seen).abs() <= bound).all()
    assert effect.trace.loss != effect.off_trace.loss
    assert effect.trace.loss == pytest.approx(effect.off_trace.loss, rel=0.05)


class Wide(nn.Module):
    """Blocks of large matrices, beside which all else is small."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


WIDE = Workload(model=Wide, batch=lambda n: {"x": torch.ones(n, 256)}, effective_batch_size=2)


@pytest.mark.parametrize("from_living", [True, False])
@pytest.mark.parametrize("value", CHANGES)
def test_building_never_holds_the_whole_model_unquantised(value: str, from_living: bool) -> None:
    # here: pytest keeps what it logs then, and with it all its callers hold
    importlib.import_module("bitsandbytes")
    config = {"quantization": value, "lora_rank": 1}
    one, count = 256 * 256 * 4, 8
    model = Wide() if from_living else None
    with StorageTracker() as tracker:
        if model is not None:
            tracker.see([*model.parameters(), *model.buffers()])
        build(WIDE, config, tiny.CPU, model=model)
    held = count * predicted_bytes(value, 256, 256)
    assert tracker.live < held + 0.3 * one  # adapters are of rank 1
    if not from_living:
        # a weight, and what quantising one takes; half of the eight at most
        assert tracker.peak < held + 4 * one
    else:
        assert tracker.peak < count * one + 4 * one  # no second copy of the model


@pytest.mark.parametrize(
    "config_json", [GPT2, FALCON], ids=lambda config_json: config_json["model_type"]
)
@pytest.mark.parametrize("value", CHANGES)
def test_gpt2s_transposed_and_falcons_own_layers_too(
    value: str, config_json: dict[str, Any]
) -> None:
    model = HuggingFaceModel("it", "causal-lm", config_json, {"kind": "directory", "path": "tiny"})
    workload = huggingface_workload(model, sequence_length=16, effective_batch_size=4)
    losses = {}
    for each in ("none", value):
        torch.manual_seed(0)
        config = {"quantization": each, "lora_rank": 4}
        setup = build(workload, config, tiny.CPU, model=workload.model().eval())
        assert len(quantised(setup.model)) == (0 if each == "none" else 8)
        setup.model.eval()  # without dropout
        losses[each] = float(setup.model(**workload.batch(4)).loss.detach())
    assert losses[value] != losses["none"]
    assert losses[value] == pytest.approx(losses["none"], rel=0.01)
    plain = dict(workload.model().named_modules())
    for name, layer in quantised(setup.model).items():
        assert dequantised(layer, torch.float32).weight.shape == plain[name].weight.shape


@pytest.mark.parametrize("value", CHANGES)
def test_training_goes_on_after_an_evaluation(value: str) -> None:
    """bitsandbytes repacks 4-bit weights for evaluation on some CPUs, and would train on with what it repacked."""
    workload = tiny.llama_workload()
    batch = workload.batch(4)

    def losses(evaluated: bool) -> list[float]:
        torch.manual_seed(0)
        config = {"quantization": value, "lora_rank": 4, "precision": "bf16"}
        hyperparameters = Hyperparameters(lr=1e-2)
        setup = build(
            workload, config, tiny.CPU, model=workload.model(), hyperparameters=hyperparameters
        )
        with contextlib.closing(setup):
            first = float(train_step(setup, batch))
            if evaluated:
                evaluate(setup, [batch])
            return [first, float(train_step(setup, batch))]

    assert losses(True) == losses(False)


@pytest.mark.parametrize("value", CHANGES)
def test_code_compiled_for_the_first_call_of_a_layer_serves_the_others(value: str) -> None:
    setup = build(WIDE, {"quantization": value, "lora_rank": 1}, tiny.CPU, model=Wide())
    counter = CompileCounter()
    with contextlib.closing(setup):
        layer = next(iter(quantised(setup.model).values()))
        compiled = torch.compile(layer.forward, backend=counter)
        for _ in range(2):
            compiled(torch.ones(1, 256))
    torch._dynamo.reset()
    assert counter.frame_count == 1


def test_a_weight_that_somebody_else_holds_too_is_left_alone() -> None:
    class Tied(Wide):
        def __init__(self) -> None:
            super().__init__(depth=3)
            self.blocks[1][0].weight = self.blocks[0][0].weight
            self.blocks.append(nn.Sequential(self.blocks[2][0], nn.ReLU()))

    workload = replace(WIDE, model=Tied)
    with pytest.raises(RefusedError, match="no frozen linear layer to quantise"):
        build(workload, {"quantization": "nf4", "lora_rank": 1}, tiny.CPU)


def test_what_it_minds() -> None:
    workload, gpu = (
        tiny.llama_workload(),
        replace(tiny.CPU, device="cuda", name="an H100", capability=(9, 0)),
    )

    def reason(**knobs) -> str | None:
        return refuse(canonicalize({"quantization": "nf4", **knobs}, workload, gpu), workload, gpu)

    assert (
        reason() == "quantization: quantised weights cannot be trained; set lora_rank, or use none."
    )
    assert "leave nothing to multiply in fp8; use precision bf16" in reason(
        lora_rank=8, precision="fp8"
    )
    assert reason(lora_rank=8) is None
    workload = replace(workload, traits=NO_LINEARS)
    config = canonicalize({"quantization": "nf4", "lora_rank": 0}, workload, tiny.CPU).replace(
        lora_rank=8
    )
    assert "no frozen linear layer" in QUANTIZATION.refuse(config, workload, tiny.CPU)


class Heads(nn.Module):
    """Whose first layer is given its inputs head by head, as latent attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(16, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        of_heads = self.first(inputs.unflatten(-1, (2, 8)))  # [samples, tokens, heads, 8]
        return self.second(of_heads.flatten(-2)).pow(2).mean()


def test_int8_multiplies_inputs_of_four_dimensions() -> None:
    """Which bitsandbytes' product on a card refuses; followed as on one, and run on the CPU."""
    batch = lambda samples: torch.ones(samples, 3, 16)  # noqa: E731
    workload = Workload(Heads, batch, effective_batch_size=2)
    knobs = {"quantization": "int8", "lora_rank": 4}
    assert trace(workload, knobs, AMPERE).events

    setup = build(workload, knobs, tiny.CPU)
    shapes = [
        layer(torch.ones(2, 3, 2, 8)).shape for layer in list(quantised(setup.model).values())[:1]
    ]
    assert shapes == [(2, 3, 2, 8)]
    setup.close()


def test_random_weights_have_no_outliers_in_int8_and_ones_own_may() -> None:
    """Activations of random weights are so large that most inputs of a probe would be multiplied unquantised."""
    workload, knobs = tiny.llama_workload(), {"quantization": "int8", "lora_rank": 4}
    thresholds = {
        layer.state.threshold
        for model in (None, workload.model())
        for layer in quantised(build(workload, knobs, tiny.CPU, model=model).model).values()
    }
    assert thresholds == {65504.0, 6.0}


def test_without_bitsandbytes_it_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    workload = tiny.llama_workload()
    config = canonicalize({"quantization": "int8", "lora_rank": 4}, workload, tiny.CPU)
    assert "pip install bitsandbytes" in refuse(config, workload, tiny.CPU)


def test_the_model_is_given_back_without_the_mark_it_bore() -> None:
    workload = tiny.transformer_workload()
    model = workload.model()
    setup = build(workload, {"quantization": "nf4", "lora_rank": 4}, tiny.CPU, model=model)
    assert model.is_loaded_in_4bit
    setup.close()
    assert not hasattr(model, "is_loaded_in_4bit")


class Reads(nn.Module):
    """Beside a layer that it calls, one whose weight it multiplies by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.called(x) @ self.read.weight.t()).square().mean()


class ReadsUnseen(Reads):
    """Nothing in its code says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weight,) = (layer.weight for name, layer in self.named_modules() if name == "read")
        return (self.called(x) @ weight.t()).square().mean()


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=32,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def mamba() -> nn.Module:
    return MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, state_size=8)
    )


def features(samples: int) -> torch.Tensor:
    return torch.ones(samples, 64)


def tokens(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(16).repeat(samples, 1)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("value", ["int8", "nf4"])
@pytest.mark.parametrize(
    ("model", "batch", "kept"),
    [(Reads, features, "read"), (t5, tokens, "wo"), (mamba, tokens, "dt_proj")],
)
def test_layers_whose_weights_are_read_by_the_models_code_stay_as_they_are(
    value, model, batch, kept
) -> None:
    workload = Workload(model, batch, effective_batch_size=2)
    knobs = {
        "lora_rank": 4,
        "lora_targets": "all-linear",
        "quantization": value,
        "precision": "bf16",
    }
    setup = build(workload, knobs, tiny.CPU)
    names = {name.rpartition(".")[2] for name in quantised(setup.model)}
    assert names
    assert kept not in names
    assert torch.isfinite(train_step(setup, batch(2)))
    setup.close()
    assert peak(traced(workload, **knobs)) == tracked(workload, knobs)


@pytest.mark.parametrize("value", CHANGES)
def test_a_model_that_computes_with_quantised_weights_is_told_in_a_sentence(value) -> None:
    workload = Workload(ReadsUnseen, features, effective_batch_size=2)
    knobs = {"lora_rank": 4, "lora_targets": "all-linear", "quantization": value}
    words = f"{value} does not fit this model, whose code computes with weights instead of calling layers"
    with pytest.raises(RefusedError, match=words):
        train_step(build(workload, knobs, tiny.CPU), features(2))
    # whose shape is that of the weight, and fake tensors do not compare formats
    if value != "int8":
        with pytest.raises(RefusedError, match=words):
            traced(workload, **knobs)
