"""What Trainer is told of a config, knob by knob."""

from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.tasks.masked_lm import MASKED_LM
from autofit.core.tasks.sequence_classification import SEQUENCE_CLASSIFICATION
from autofit.export.trainer import TrainerCase, TrainerKeywords, trainer_keywords
from autofit.techniques import all_techniques

OFF = {technique.name: technique.off for technique in all_techniques()}
SIZES = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}


def told(
    device: str = "cpu", *, case: dict[str, Any] | None = None, **knobs: Any
) -> TrainerKeywords:
    return trainer_keywords(TrainerCase(Config({**OFF, **SIZES, **knobs}), device, **(case or {})))


def test_what_is_off_leaves_only_batch_sizes_and_autofits_own_defaults() -> None:
    keywords = told()
    assert keywords.arguments == {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,  # Trainer's default would clip
        "remove_unused_columns": False,
        "use_cpu": True,
        "optim": "adamw_torch_fused",
    }
    assert keywords.model == {"dtype": "float32"}
    assert not (keywords.lora or keywords.quantization or keywords.notes)


@pytest.mark.parametrize(
    ("precision", "rank", "dtype", "trained", "arguments"),
    [
        ("fp32", 0, "float32", "float32", {"tf32": False}),
        ("tf32", 0, "float32", "float32", {"tf32": True}),
        ("bf16", 0, "bfloat16", "bfloat16", {}),
        ("bf16", 8, "bfloat16", "bfloat16", {}),
        ("bf16-mixed", 0, "float32", "float32", {"bf16": True}),
        ("bf16-mixed", 8, "bfloat16", "float32", {"bf16": True}),
        ("fp16-mixed", 0, "float32", "float32", {"fp16": True}),
        ("fp16-mixed", 8, "float16", "float32", {"fp16": True}),
        ("fp8", 0, "bfloat16", "bfloat16", {}),
    ],
)
def test_precision_is_that_of_the_designs_table(
    precision: str, rank: int, dtype: str, trained: str, arguments: dict[str, bool]
) -> None:
    keywords = told("cuda", precision=precision, lora_rank=rank)
    assert keywords.model == {"dtype": dtype}
    assert keywords.trained_dtype == trained
    assert {
        name: keywords.arguments[name]
        for name in ("bf16", "fp16", "tf32")
        if name in keywords.arguments
    } == (arguments)
    assert keywords.arguments["use_cpu"] is False


def test_adapters_have_an_alpha_of_32_unless_it_is_set() -> None:
    assert told(lora_rank=8).lora == {"r": 8, "lora_alpha": 32, "lora_dropout": 0.0}
    assert told(lora_rank=8, lora_alpha=4, lora_dropout=0.1).lora == {
        "r": 8,
        "lora_alpha": 4,
        "lora_dropout": 0.1,
    }


def test_frozen_weights_are_quantised_as_measured() -> None:
    assert told(quantization="int8", lora_rank=8).quantization == {"load_in_8bit": True}
    keywords = told(
        quantization="nf4-dq", lora_rank=8, precision="bf16", case={"task": SEQUENCE_CLASSIFICATION}
    )
    assert keywords.quantization == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": ["score", "classifier", "pre_classifier"],
    }


def test_checkpointing_and_offloading_go_together() -> None:
    full = told("cuda", activation_checkpointing="full")
    assert full.arguments["activation_checkpointing_kwargs"] == {"use_reentrant": False}
    assert not full.notes
    offloaded = told("cuda", activation_checkpointing="alternate", activation_offload="cpu")
    assert offloaded.arguments["activation_checkpointing_kwargs"] == {
        "use_reentrant": False,
        "every_n_layers": 2,
        "offload": True,
    }
    assert len(offloaded.notes) == 2
    bare = told("cuda", activation_offload="cpu")
    assert "activation_checkpointing" not in bare.arguments
    assert "more memory than measured" in bare.notes[0]


def test_ligers_kernels_and_its_loss_are_switched_on_apart() -> None:
    kernels = told("cuda", kernels="liger").arguments
    assert kernels["use_liger_kernel"]
    assert kernels["liger_kernel_config"] == {
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    loss = told("cuda", loss="fused").arguments
    assert loss["liger_kernel_config"]["fused_linear_cross_entropy"]
    assert loss["liger_kernel_config"]["rms_norm"] is False
    both = told("cuda", kernels="liger", loss="fused").arguments
    assert both["liger_kernel_config"] == {
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
    }


def test_stochastic_rounding_is_an_argument_of_torchaos_optimizer() -> None:
    found = told("cuda", precision="bf16", optimizer="adamw-8bit-sr")
    wanted = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
    assert wanted.items() <= found.arguments.items()
    assert not found.notes
    # with states in 32 bits, or beside copies of the weights
    for value in ("adamw-sr", "adamw-master"):
        (note,) = told("cuda", precision="bf16", optimizer=value).notes
        assert note.endswith("takes its place, in less memory than measured.")
    assert told("cuda", optimizer="lion-8bit").arguments["adam_beta2"] == 0.99


def test_flash_attention_is_named_where_its_package_is() -> None:
    assert told("cuda", attention="flash", case={"flash_attn": True}).model[
        "attn_implementation"
    ] == ("flash_attention_2")
    without = told("cuda", attention="flash")
    assert without.model["attn_implementation"] == "sdpa"
    assert without.notes
    assert told(attention="eager").model["attn_implementation"] == "eager"


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("precision", "fp8"),
        ("activation_checkpointing", "alternate"),
        ("activation_checkpointing", "selective"),
        ("activation_checkpointing", "full:1"),
        ("activation_checkpointing", "budget-0.5"),
        ("activation_offload", "cpu"),
        ("optimizer", "adamw-8bit"),
        ("optimizer", "lion-8bit"),
        ("optimizer", "adamw-4bit"),
        ("optimizer", "adamw-fp8"),
        ("optimizer", "adamw-master"),
        ("optimizer", "muon"),
        ("optimizer", "adamw-sr"),
        ("optimizer_offload", "cpu"),
        ("optimizer_in_backward", True),
        ("parameter_offload", "cpu"),
        ("compile", "default"),
        ("loss", "chunked"),
        ("memory_format", "channels_last"),
        ("tensor_parallel", 2),
        ("context_parallel", 2),
    ],
)
def test_what_trainer_runs_otherwise_is_said_in_one_sentence(knob: str, value: Any) -> None:
    (note,) = told("cuda", **{knob: value}).notes
    assert note.startswith(f"{knob} {str(value).lower()}: ")
    assert note.endswith(".")


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        (technique.name, value)
        for technique in all_techniques()
        for value in technique.values
        if value != technique.off
        and technique.name != "lora_targets"  # chosen among a model's layers, by hf_trainer
        and (technique.name, value) != ("data_parallel", "none")  # Trainer's way
    ],
)
def test_every_value_is_told_or_noted(knob: str, value: Any) -> None:
    beside = {"lora_rank": 8} if knob.startswith("lora_") else {}
    assert told("cuda", **beside, **{knob: value}) != told("cuda", **beside), "left out in silence"


def test_masked_language_models_are_noted_for_their_uneven_micro_batches() -> None:
    assert told(case={"task": MASKED_LM}).notes[0].startswith("gradient_accumulation_steps 4: ")
    assert not told(case={"task": MASKED_LM}, gradient_accumulation_steps=1).notes


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(InputError, match="micro_batch_size must be a whole number here, not None"):
        told(micro_batch_size=None)
    with pytest.raises(
        InputError, match="2 x gradient_accumulation_steps 4 is not the effective batch of 16"
    ):
        told(case={"effective_batch_size": 16})
    with pytest.raises(InputError, match="fp16-mixed on a GPU only"):
        told(precision="fp16-mixed")
