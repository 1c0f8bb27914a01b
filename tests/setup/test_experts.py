"""Experts: their adapters and their quantised form train as the same weights in plain parameters would."""

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn.utils import parametrize

from autofit.core.errors import RefusedError
from autofit.core.hardware import GIB
from autofit.core.workload import Hyperparameters
from autofit.estimate.figures import predict_all
from autofit.estimate.peak import peak_of
from autofit.hardware.tracker import StorageTracker
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup import Setup
from autofit.setup.experts import expert_weights, quantised_weights
from autofit.techniques import canonicalize
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.build import build
from autofit.training.save_model import merged, save_model
from autofit.training.step import accumulate, train_step
from tests.estimate.traced import AMPERE, peak, traced, tracked
from tests.tiny import CPU, MIXTURES, llama_workload, mixture_workload

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
VALUES = "int8", "nf4", "nf4-dq"
ADAPTED = {"lora_rank": 4, "lora_targets": "attention+experts"}
TABLE = 4 * 256  # bytes of bitsandbytes' codes for scales of scales, which belong to no trace


def built(kind: str = "qwen3_moe", **knobs: Any) -> Setup:
    """A model with weights that a seed draws, and adapters that are not zero."""
    workload = mixture_workload(kind)
    torch.manual_seed(0)
    model = workload.model()
    setup = build(
        workload, {**ADAPTED, **knobs}, CPU, model=model, hyperparameters=Hyperparameters(lr=1e-2)
    )
    with torch.no_grad():
        for parameter in (parameter for name, parameter in setup.trainable() if "lora_B" in name):
            parameter.normal_(0.0, 0.02)
    return setup


def _dequantised(setup: Setup) -> None:
    """Give the same setup plain parameters of the values that it computes with."""
    for module in list(setup.model.modules()):
        for name, stored in list(quantised_weights(module)):
            values = stored[0](stored.original)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
        vars(module).pop("_activate_lora", None)  # as peft has it


@pytest.mark.parametrize(("kind", "checkpointing"), [("qwen3_moe", "full"), ("gpt_oss", "none")])
@pytest.mark.parametrize("value", VALUES)
def test_quantised_experts_with_adapters_learn_as_peft_does_on_their_values(
    kind: str, value: str, checkpointing: str
) -> None:
    torch.manual_seed(1)
    batch = mixture_workload(kind).batch(4)
    seen = []
    for plain in (False, True):
        with closing(
            built(kind, quantization=value, activation_checkpointing=checkpointing)
        ) as setup:
            if plain:
                _dequantised(setup)
            losses = [accumulate(setup, batch)]
            gradients = {name: parameter.grad for name, parameter in setup.trainable()}
            assert all(gradient is not None and gradient.any() for gradient in gradients.values())
            setup.optimizer.step()
            losses.append(accumulate(setup, batch))  # with nothing left from the first time
            seen.append((losses, gradients))
        assert parametrize._cache_enabled == 0
    (losses, gradients), (expected, reference) = seen
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    assert losses[1] < losses[0]
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference[name])


@pytest.mark.parametrize("value", VALUES)
def test_quantised_experts_hold_few_bits_and_nearly_the_same_values(value: str) -> None:
    setup, plain = built(quantization=value), built()
    names = [weight.full_name for weight in expert_weights(plain.model)]
    assert names == [
        f"model.layers.{n}.mlp.experts.{name}"
        for n in range(2)
        for name in ("gate_up_proj", "down_proj")
    ]
    bits = 8 if value == "int8" else 4
    for quantised, given in zip(
        expert_weights(setup.model), expert_weights(plain.model), strict=True
    ):
        elements = given.parameter.numel()
        assert quantised.parameter.nbytes == elements * bits // 8
        values = getattr(quantised.module, quantised.name)
        assert values.shape == given.parameter.shape
        worst = {"int8": 0.51 / 127, "nf4": 0.16, "nf4-dq": 0.17}[
            value
        ] * given.parameter.abs().max()
        assert 0 < (values - given.parameter).abs().max() <= worst


@pytest.mark.parametrize("value", VALUES)
def test_building_never_holds_all_experts_unquantised(value: str) -> None:
    wide = mixture_workload(num_experts=64, num_hidden_layers=4)
    one = 64 * 128 * 64 * 4
    with StorageTracker() as tracker:
        build(
            wide,
            {**ADAPTED, "lora_rank": 1, "lora_targets": "attention", "quantization": value},
            CPU,
        )
    # of six times one
    assert tracker.peak < 6 * 1.3 * one / (32 / (8 if value == "int8" else 4)) + 3 * one


CONFIGS: list[dict[str, Any]] = [
    {"precision": "bf16", "activation_checkpointing": "selective"},
    {"lora_rank": 4, "lora_targets": "attention", "quantization": "nf4"},
    {**ADAPTED, "precision": "bf16", "activation_checkpointing": "full"},
    {
        **ADAPTED,
        "precision": "bf16-mixed",
        "quantization": "nf4-dq",
        "activation_checkpointing": "full",
    },
    {**ADAPTED, "precision": "bf16", "quantization": "int8", "micro_batch_size": 2},
]


@pytest.mark.parametrize(("kind", "knobs"), [("qwen3_moe", knobs) for knobs in CONFIGS])
def test_a_predicted_step_takes_what_a_probe_reports(kind: str, knobs: dict[str, Any]) -> None:
    workload = mixture_workload(kind)
    assert peak(traced(workload, **knobs)) == pytest.approx(tracked(workload, knobs), abs=TABLE)


@pytest.mark.parametrize("kind", list(MIXTURES)[1:])
def test_other_mixtures_too(kind: str) -> None:
    test_a_predicted_step_takes_what_a_probe_reports(kind, CONFIGS[3])


def test_streamed_experts_leave_the_device() -> None:
    workload = mixture_workload(num_experts=64, num_hidden_layers=4)
    knobs = {
        "lora_rank": 4,
        "lora_targets": "attention",
        "quantization": "nf4",
        "activation_checkpointing": "full",
    }
    traces = (traced(workload, AMPERE, **knobs, parameter_offload=each) for each in ("none", "cpu"))
    plain, streamed = (peak_of(each, AMPERE).nbytes for each in traces)
    of_a_block = 64 * 3 * 64 * 64 // 2
    assert plain - streamed > 1.9 * of_a_block  # of four blocks, two are there


QWEN3_30B_A3B = {  # what its config.json says of its size
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def test_30_billion_parameters_are_predicted_on_a_card_of_24_gb_unless_the_experts_are_adapted() -> (
    None
):
    """Of 30.5 billion, 4.5 bits each but for the embeddings and the head, which take 1.2 GB together."""
    model = HuggingFaceModel("qwen3-30b-a3b", "causal-lm", QWEN3_30B_A3B)
    workload = huggingface_workload(model, sequence_length=2048, effective_batch_size=32)
    knobs = {
        "precision": "bf16",
        "quantization": "nf4",
        "activation_checkpointing": "full",
        "loss": "chunked",
    }
    knobs |= {"lora_rank": 16, "micro_batch_size": 1}
    targets = "attention", "attention+experts"
    configs = [canonicalize({**knobs, "lora_targets": each}, workload, AMPERE) for each in targets]
    attention, experts = predict_all(workload, AMPERE, configs)[0]
    adapters = 48 * 128 * 16 * ((2048 + 1536) + (768 + 2048))
    assert 17.5 * GIB < attention < 19.5 * GIB
    # with gradients and two moments, in 2 bytes
    assert attention + adapters * 2 * 4 * 0.95 < experts < 24 * GIB


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("value", ["none", *VALUES])
def test_merged_experts_are_plain_and_compute_the_same(kind: str, value: str) -> None:
    setup = built(kind, quantization=value)
    setup.close()
    model, batch = setup.model.eval(), setup.workload.batch(4)
    plain = merged(model)
    assert type(plain.model.layers[0].mlp.experts) is type(
        setup.workload.model().model.layers[0].mlp.experts
    )
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch).loss, model(**batch).loss, rtol=1e-3, atol=0.0)


def test_saved_adapters_of_experts_are_read_by_peft(tmp_path: Path) -> None:
    workload = mixture_workload()
    torch.manual_seed(0)
    model = workload.model()
    base = copy.deepcopy(model)
    setup = build(workload, ADAPTED, CPU, model=model, hyperparameters=Hyperparameters(lr=1e-2))
    for _ in range(2):
        train_step(setup, workload.batch(4))
    setup.close()
    save_model(setup, tmp_path)
    batch = workload.batch(4)
    with torch.no_grad():
        expected, before = (model.eval()(**batch).loss for model in (setup.model, base))
        assert before != expected
        torch.testing.assert_close(
            PeftModel.from_pretrained(base, tmp_path).eval()(**batch).loss, expected
        )


def test_what_is_recommended_for_experts_can_be_named() -> None:
    """Of the two weights of each expert one has an adapter already; peft's wrappers are no names of layers."""
    (note,) = [
        each for each in built(lora_targets="down_proj").warnings if "adapts its experts" in each
    ]
    named = note.partition("; +")[2].partition(" ")[0]
    assert named == "experts"
    assert adapter_targets(mixture_workload().model(), named)[1]


def test_names_choose_layers_and_experts() -> None:
    model = mixture_workload().model()

    def chosen(targets: str) -> list[str]:
        return [
            name.removeprefix("model.layers.")
            for names in adapter_targets(model, targets)
            for name in names
        ]

    assert chosen("q_proj+v_proj") == [
        f"{n}.self_attn.{name}_proj" for n in range(2) for name in "qv"
    ]
    assert chosen("1.mlp") == ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]
    assert chosen("lm_head+down_proj") == [
        "lm_head",
        *(f"{n}.mlp.experts.down_proj" for n in range(2)),
    ]
    assert chosen("attention+experts") == chosen("attention") + chosen("experts")
    with pytest.raises(
        RefusedError,
        match=r"no layer named gate .*it has q_proj, k_proj, .*gate_up_proj, down_proj",
    ):
        chosen("gate")


def test_experts_take_no_dropout() -> None:
    with pytest.raises(RefusedError, match="experts take no dropout; set lora_dropout 0"):
        built(lora_dropout=0.1)


def test_a_note_says_how_much_of_a_mixture_is_reached() -> None:
    (note,) = built(lora_targets="attention", quantization="nf4").warnings
    assert note == (
        "adapters reach 23 % of this mixture's weights and quantisation 93 %; +experts in lora_targets adapts its "
        "experts."
    )
    assert built().warnings == ["adapters reach 93 % of this mixture's weights."]
    assert traced(mixture_workload(), **ADAPTED).assumptions == (
        "adapters reach 93 % of this mixture's weights.",
    )
    assert not build(llama_workload(), {"lora_rank": 4}, CPU).warnings
