"""lora_rank: which layers get adapters, what stays trained whole, and what peft has to say."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from autofit.core.errors import RefusedError
from autofit.core.workload import Hyperparameters, Traits, Workload
from autofit.estimate.trace import trace
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup.layers import output_head
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.inspect import inspect_workload
from autofit.training.step import accumulate, train_step
from tests import tiny
from tests.techniques.contract import Effect, linears, living

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
}
NO_LINEARS = Traits(
    parameters=1, blocks=0, linears=0, attention=False, sdpa=False, batch_norm=False, dropout=False
)


def trained(setup) -> set[str]:
    return {name for name, _ in setup.trainable()}


def test_full_names_so_that_no_layer_is_met_by_accident() -> None:
    targets = adapter_targets(tiny.Transformer(depth=2), "attention")[0]
    assert targets == [
        f"blocks.{index}.attn.{part}" for index in range(2) for part in ("qkv", "out")
    ]


def test_the_head_of_a_plain_module_is_unknown_so_all_linear_layers_are_targets() -> None:
    model = tiny.Transformer(depth=2)
    assert output_head(model) is None
    assert "head" in adapter_targets(model, "all-linear")[0]


def test_the_head_of_a_transformers_model_is_left_out_unless_named() -> None:
    model = tiny.llama()()
    assert output_head(model) is model.lm_head
    assert "lm_head" not in adapter_targets(model, "all-linear")[0]
    with_head, without = (
        set(adapter_targets(model, targets)[0]) for targets in ("all-linear+head", "all-linear")
    )
    assert with_head - without == {"lm_head"}


class WithReference(nn.Module):
    """A policy beside the frozen model that it started from, as in direct preference optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = (
            tiny.Transformer(depth=2),
            tiny.Transformer(depth=2).requires_grad_(False),
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.policy(tokens, targets) - self.reference(tokens, targets)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_frozen_reference_stays_frozen(quantization: str) -> None:
    workload = replace(tiny.transformer_workload(), model=WithReference)
    knobs = {
        "lora_rank": 4,
        "lora_targets": "all-linear",
        "quantization": quantization,
        "precision": "bf16",
    }
    setup = build(workload, knobs, tiny.CPU)
    names = trained(setup)
    assert names
    assert all(name.startswith("policy.") for name in names)
    assert not any(hasattr(module, "lora_A") for module in setup.model.reference.modules())
    setup.close()
    for knobs in ({}, {"lora_rank": 4, "lora_targets": "all-linear", "precision": "bf16"}):
        shapes = {shape.numel() for shape, _, _ in trace(workload, knobs, tiny.CPU).shapes}
        plain = trace(tiny.transformer_workload(), knobs, tiny.CPU)
        assert shapes == {shape.numel() for shape, _, _ in plain.shapes}
    assert adapter_targets(tiny.MLP().requires_grad_(False), "all-linear")[0], (
        "frozen as a whole: adapters are all there is"
    )


def test_a_model_without_the_layers_is_refused() -> None:
    with pytest.raises(
        RefusedError, match="no linear layers for lora_targets attention; use all-linear"
    ):
        build(tiny.mlp_workload(), {"lora_rank": 4, "lora_targets": "attention"}, tiny.CPU)
    for count, reason in (
        (0, "the model has no linear layers to put adapters beside"),
        (1, "the model's only linear layer is its head, and an adapter there would learn little"),
    ):
        workload = replace(tiny.mlp_workload(), traits=replace(NO_LINEARS, linears=count))
        config = canonicalize({"lora_rank": 4}, workload, tiny.CPU)
        assert refuse(config, workload, tiny.CPU) == f"lora_rank: {reason}; use lora_rank 0."


def test_without_peft_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    workload = tiny.llama_workload()
    config = canonicalize({"lora_rank": 4}, workload, tiny.CPU)
    assert "pip install peft" in refuse(config, workload, tiny.CPU)
    assert refuse(canonicalize({}, workload, tiny.CPU), workload, tiny.CPU) is None


def test_the_transposed_layers_of_gpt2_get_adapters_too_without_a_warning() -> None:
    workload = huggingface_workload(
        HuggingFaceModel("gpt2", "causal-lm", GPT2), sequence_length=8, effective_batch_size=2
    )
    setup = build(workload, {"lora_rank": 2}, tiny.CPU)
    assert sum(parameter.numel() for _, parameter in setup.trainable()) == 2 * 2 * sum(
        # c_attn, c_proj, c_fc, c_proj: in + out, of each of two layers
        (32 + 96, 32 + 32, 32 + 128, 128 + 32)
    )
    assert accumulate(setup, workload.batch(2)).isfinite()
    assert not setup.warnings


def test_what_peft_warns_of_is_told_as_a_warning_of_the_run() -> None:
    workload = tiny.llama_workload(tie_word_embeddings=True)
    (warning,) = build(
        workload, {"lora_rank": 2, "lora_targets": "all-linear+head"}, tiny.CPU
    ).warnings
    assert "tied" in warning


def test_a_new_classifier_is_trained_whole_beside_the_adapters() -> None:
    model = HuggingFaceModel("tiny", "sequence-classification", tiny.LLAMA | {"num_labels": 3})
    workload = huggingface_workload(model, sequence_length=8, effective_batch_size=2)
    setup = build(workload, {"lora_rank": 2}, tiny.CPU)
    whole = {name for name in trained(setup) if "lora_" not in name}
    assert whole == {"score.weight"}
    assert not any("score" in name and "lora_" in name for name in trained(setup))


def test_a_living_model_computes_what_it_did_until_the_first_step() -> None:
    torch.manual_seed(0)
    model = tiny.Transformer()
    batch = tiny.transformer_workload().batch(4)
    before = model(**batch)
    build(tiny.transformer_workload(), {"lora_rank": 4}, tiny.CPU, model=model)
    assert torch.equal(model(**batch), before)


@pytest.mark.parametrize("rank", [4, 8, 32])
def test_updates_are_scaled_by_32_over_the_rank(rank: int) -> None:
    setup = build(tiny.transformer_workload(), {"lora_rank": rank}, tiny.CPU)
    scalings = [
        module.scaling["default"] for module in setup.model.modules() if hasattr(module, "scaling")
    ]
    assert set(scalings) == {32 / rank}


def test_the_model_keeps_its_class() -> None:
    assert (
        type(build(tiny.transformer_workload(), {"lora_rank": 4}, tiny.CPU).model)
        is tiny.Transformer
    )


def test_what_it_accepts() -> None:
    technique = technique_named("lora_rank")
    assert all(technique.accepts(rank, tiny.CPU) for rank in (0, 1, 7, 1024))
    assert not any(technique.accepts(rank, tiny.CPU) for rank in (-1, 1025, 8.0, True, "8", None))
    assert technique.fidelity(8) > technique.fidelity(4)


def test_convolutions_are_no_targets() -> None:
    setup = build(tiny.conv_workload(), {"lora_rank": 2}, tiny.CPU)
    assert {name.partition(".lora_")[0] for name in trained(setup)} == {"fc"}
    assert isinstance(setup.model.stem, nn.Conv2d)


NUMBERS = (1, 4, 8)


def sees_adapters(effect: Effect, rank: int, chosen: Callable[[str, nn.Linear], bool]) -> None:
    """Adapters of that rank beside the chosen linear layers, all else frozen and still."""
    targets = {name: each for name, each in linears(effect.off.model).items() if chosen(name, each)}
    expected = sum(rank * (each.in_features + each.out_features) for each in targets.values())
    trainable = effect.setup.trainable()
    assert sum(parameter.numel() for _, parameter in trainable) == expected
    assert {key.partition(".lora_")[0] for key, _ in trainable} == set(targets)
    assert math.isfinite(effect.trace.loss)  # the step has run
    before = living(effect.setup.workload).state_dict()
    after = {
        key.replace("base_layer.", ""): each
        for key, each in effect.setup.model.state_dict().items()
    }
    assert all(torch.equal(after[key], before[key]) for key in before)
    # 0 until it was trained
    assert all(parameter.any() for key, parameter in trainable if "lora_B" in key)


def shows(effect: Effect) -> None:
    head = output_head(effect.off.model)
    sees_adapters(effect, effect.value, lambda name, each: each is not head)
    assert len(effect.off.trainable()) == len(list(effect.off.model.parameters()))


class Encoder(nn.Module):
    """PyTorch's own encoder layers, which evaluate by a fast path of their own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x).mean(1)).square().mean()


@pytest.mark.parametrize("quantization", ["none", "int8", "nf4"])
def test_pytorchs_own_encoder_is_evaluated_with_its_adapters(quantization: str) -> None:
    batch = {"x": torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0))}
    workload = Workload(model=Encoder, batch=lambda n: batch, effective_batch_size=4)
    config = {"lora_rank": 4, "quantization": quantization}
    setup = build(workload, config, tiny.CPU, hyperparameters=Hyperparameters(lr=0.05))
    # their weights are read, not called
    assert not any("self_attn" in name for name, _ in setup.trainable())
    for _ in range(3):
        train_step(setup, batch)
    # Past the adapters it was 6 % off. bitsandbytes multiplies int8 in another way in evaluation.
    expected = pytest.approx(
        float(accumulate(setup, batch)), rel=0.02 if quantization == "int8" else 1e-4
    )
    assert evaluate(setup, [batch]) == expected
    setup.close()
    with torch.no_grad():
        # and by whom the model is given back to
        assert float(setup.model.eval()(**batch)) == expected


def test_the_nested_tensors_of_pytorchs_encoder_are_left_too() -> None:
    class Padded(Encoder):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, mask_check=False)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            features = self.encoder(x, src_key_padding_mask=padding)
            return self.out(features).masked_fill(padding[..., None], 0.0).square().mean()

    padding = torch.arange(6).expand(4, 6) >= torch.tensor([3, 4, 5, 6])[:, None]
    batch = {
        "x": torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0)),
        "padding": padding,
    }
    workload = Workload(model=Padded, batch=lambda n: batch, effective_batch_size=4)
    setup = build(workload, {"lora_rank": 4}, tiny.CPU, hyperparameters=Hyperparameters(lr=0.05))
    for _ in range(3):
        train_step(setup, batch)
    expected = pytest.approx(float(accumulate(setup, batch)), rel=1e-4)
    assert evaluate(setup, [batch]) == expected


# of a layer; of a model without embeddings
@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_what_peft_does_not_take_is_refused(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    def no(_: object, model: nn.Module, **__: object) -> None:
        if isinstance(model, PreTrainedModel):
            raise kind("Module 'q_proj' cannot be\n adapted. And more.")

    monkeypatch.setattr(peft, "inject_adapter_in_model", no)
    with pytest.raises(
        RefusedError, match="peft cannot put adapters here: Module 'q_proj' cannot be adapted;"
    ):
        build(tiny.llama_workload(), {"lora_rank": 4}, tiny.CPU)


def test_a_layer_that_peft_forbids_is_left_out_alone() -> None:
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)
    targets = adapter_targets(MambaForCausalLM(config), "all-linear")[0]
    assert [name.rpartition(".")[2] for name in targets] == ["in_proj", "x_proj", "dt_proj"]


class Follows(nn.Module):
    """Of two networks one follows the other slowly, parameter by parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)) for _ in range(2)
        )
        self.target.requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return (self.head(self.online(x)) - self.target(x)).square().mean()  # type: ignore[no-any-return]


class Detached(nn.Module):
    """Trains what it multiplies the output of its layers by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = (
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            nn.Parameter(torch.ones(8)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = self.layers(x)
        return (out * self.scale).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Follows,
            r"adapters do not fit this model, whose code goes through its parameters \(.*\); use lora_rank 0\.",
        ),
        (
            Detached,
            r"no adapter takes part in the loss, by the model's own code; use lora_rank 0\.",
        ),
    ],
)
def test_a_model_whose_code_leaves_no_room_for_adapters_is_refused(
    model: type[nn.Module], message: str
) -> None:
    workload = Workload(model, lambda n: {"x": torch.ones(n, 8)}, effective_batch_size=2)
    assert math.isfinite(train_step(build(workload, {}, tiny.CPU), workload.batch(2)))
    with pytest.raises(RefusedError, match=message):
        train_step(build(workload, {"lora_rank": 2}, tiny.CPU), workload.batch(2))


class Router(nn.Linear):
    """As of mixtures of experts: its call returns more than a tensor."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(inputs).topk(1)  # type: ignore[return-value]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.router = nn.Linear(8, 8), Router(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, _ = self.router(x)
        return (self.values(x) * weight).mean()  # type: ignore[no-any-return]


def test_a_layer_that_returns_more_than_a_tensor_gets_no_adapters() -> None:
    workload = Workload(Routed, lambda n: {"x": torch.ones(n, 8)}, effective_batch_size=2)
    setup = build(workload, {"lora_rank": 2}, tiny.CPU)
    assert trained(setup) == {"values.lora_A.default.weight", "values.lora_B.default.weight"}
    assert math.isfinite(train_step(setup, workload.batch(2)))


def test_a_name_that_others_end_in_stands_for_itself_alone() -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), nn.Linear(8, 1)
        )

    workload = Workload(
        model=model,
        batch=lambda n: {"input": torch.randn(n, 8)},
        loss=lambda model, batch: model(**batch).square().mean(),
        effective_batch_size=2,
    )
    setup = build(workload, {"lora_rank": 2}, tiny.CPU)  # "0" is a layer, and "1.0" no linear one
    assert {name.partition(".lora_")[0] for name in trained(setup)} == {"0", "1.1", "2"}
    assert accumulate(setup, workload.batch(2)).isfinite()


CLASSIFIERS = {
    "roberta": ("RobertaForSequenceClassification", {"classifier.dense", "classifier.out_proj"}),
    "distilbert": ("DistilBertForSequenceClassification", {"pre_classifier", "classifier"}),
    "bert": ("BertForSequenceClassification", {"classifier"}),
}


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_every_layer_of_a_new_head_is_trained_whole_and_never_quantised(
    kind: str, quantization: str
) -> None:
    name, heads = CLASSIFIERS[kind]
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_labels": 3,
    }
    more = {
        "dim": 64,
        "hidden_dim": 64,
        "n_layers": 1,
        "n_heads": 2,
        "intermediate_size": 64,
        "pad_token_id": 0,
    }
    model = HuggingFaceModel(
        "tiny", "sequence-classification", {"model_type": kind, **shape, **more}
    )
    workload = huggingface_workload(model, sequence_length=8, effective_batch_size=2)
    setup = build(
        workload,
        {"lora_rank": 2, "lora_targets": "all-linear+head", "quantization": quantization},
        tiny.CPU,
    )
    assert type(setup.model).__name__ == name
    whole = {key.rpartition(".")[0] for key in trained(setup) if "lora_" not in key}
    assert whole == heads
    assert not any(key.startswith(tuple(heads)) for key in trained(setup) if "lora_" in key)
    assert all(type(setup.model.get_submodule(key)) is nn.Linear for key in heads)
    assert accumulate(setup, workload.batch(2)).isfinite()


def test_adapters_on_adapters_are_refused_and_those_there_can_be_trained_on() -> None:
    workload, model = tiny.transformer_workload(), tiny.Transformer()
    build(workload, {"lora_rank": 4}, tiny.CPU, model=model).close()
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with pytest.raises(
        RefusedError,
        match="already has adapters from an earlier training: use lora_rank 0 to train",
    ):
        build(workload, {"lora_rank": 4}, tiny.CPU, model=model)
    assert trained(build(workload, {}, tiny.CPU, model=model)) == before


# peft asks for it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_that_has_adapters_is_known_before_it_is_built() -> None:
    workload = tiny.llama_workload()
    adapters = LoraConfig(r=4, target_modules=["q_proj"])
    adapted = replace(workload, model=lambda: get_peft_model(workload.model(), adapters))
    for known in (workload, adapted):
        traits = inspect_workload(known, tiny.CPU, None)
        assert traits.head
        reason = refuse(
            canonicalize({"lora_rank": 4}, known, tiny.CPU), replace(known, traits=traits), tiny.CPU
        )
        assert (reason is None) == (known is workload)
    assert reason.startswith("lora_rank: the model already has adapters")


def quantized_llama() -> nn.Module:
    """As from_pretrained with a quantization_config gives it: 4-bit linear layers, no adapters."""
    from bitsandbytes.nn import Linear4bit

    model = tiny.llama()()
    for layer in model.model.layers:
        old = layer.mlp.up_proj
        new = Linear4bit(old.in_features, old.out_features, bias=False, compute_dtype=torch.float32)
        layer.mlp.up_proj = new.requires_grad_(False)
    return model


def test_norms_alone_are_not_trained_of_a_model_that_came_quantised() -> None:
    workload = replace(tiny.llama_workload(), model=quantized_llama)
    known = replace(workload, traits=inspect_workload(workload, tiny.CPU, None))

    def reason(**knobs: object) -> str | None:
        return refuse(canonicalize(knobs, known, tiny.CPU), known, tiny.CPU)

    assert "its norms and embeddings alone would be trained" in str(reason())
    assert reason(lora_rank=4) is None
    plain = replace(workload, model=tiny.llama())
    assert not inspect_workload(plain, tiny.CPU, None).quantized
