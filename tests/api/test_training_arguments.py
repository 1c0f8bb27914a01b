"""Trainer, told by autofit, against autofit's own loop; and what it refuses."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.trainer_callback import PrinterCallback

import autofit
from autofit.api.training_arguments import TrainerSetup
from autofit.core.budget import Budget
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.result import Result, SavedResult
from tests import tiny

SIZES = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
STEPS = 4
AUTO_CLASSES = {
    "llama": (AutoModelForCausalLM, tiny.LLAMA),
    "gpt2": (AutoModelForCausalLM, tiny.GPT2),
    "bert": (AutoModelForMaskedLM, tiny.BERT),
    "bert-classifier": (AutoModelForSequenceClassification, tiny.BERT),
    "llama-classifier": (AutoModelForSequenceClassification, {**tiny.LLAMA, "pad_token_id": 0}),
    "vit": (AutoModelForImageClassification, tiny.VIT),
}


def make(name: str) -> nn.Module:
    auto_class, config = AUTO_CLASSES[name]
    torch.manual_seed(0)
    return auto_class.from_config(
        CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(dict(config)))
    )


def samples(name: str) -> list[dict[str, torch.Tensor]]:
    """One effective batch of texts padded to unlike lengths, or of images."""
    generator = torch.Generator().manual_seed(0)
    return [_sample(name, generator) for _ in range(8)]


def _sample(name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if name == "vit":
        image = torch.randn(3, 16, 16, generator=generator)
        return {"pixel_values": image, "labels": torch.randint(10, (), generator=generator)}
    ids = torch.randint(3, 64, (16,), generator=generator)
    real = torch.arange(16) < torch.randint(3, 17, (), generator=generator)
    labels = ids.masked_fill(~real, -100)
    if name.endswith("classifier"):
        labels = torch.randint(2, (), generator=generator)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def trained_by_trainer(
    setup: TrainerSetup, model: nn.Module, rows: list[Any]
) -> tuple[Any, list[float]]:
    torch.manual_seed(0)  # of adapters, as in fit
    trainer = Trainer(
        setup.prepare(model), setup.arguments, train_dataset=rows, data_collator=collate
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def curves(tmp_path: Path) -> Callable[..., tuple[list[float], list[float]]]:
    """The losses of autofit's loop and of Trainer, of the same model on the same samples."""

    def run(name: str, **knobs: Any) -> tuple[list[float], list[float]]:
        config, rows = {**SIZES, **knobs}, samples(name)
        mine = autofit.fit(
            make(name), [collate(rows)], config=config, device="cpu", lr=1e-2, steps=STEPS
        )
        model = make(name)
        setup = autofit.training_arguments(config, model=model, output_dir=tmp_path, **OVERRIDES)
        return [report.loss for report in mine.history], trained_by_trainer(setup, model, rows)[1]

    return run


OVERRIDES = {
    "learning_rate": 1e-2,
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_strategy": "no",
    "train_sampling_strategy": "sequential",
    "disable_tqdm": True,
}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-classifier", "llama-classifier", "vit"])
def test_trainer_weighs_micro_batches_as_autofit_does(
    name: str, curves: Callable[..., Any]
) -> None:
    mine, theirs = curves(name)
    assert len(mine) == STEPS
    assert theirs == pytest.approx(mine, rel=2e-6)
    assert mine[-1] < 0.98 * mine[0]  # something was learnt, so the gradients were compared too


def test_a_masked_language_models_micro_batches_weigh_alike(curves: Callable[..., Any]) -> None:
    """As the note says: near, and not four times as large, which is what Trainer makes of it when left alone."""
    mine, theirs = curves("bert")
    assert theirs == pytest.approx(mine, rel=0.05)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-classifier"])
def test_adapters_learn_the_same(name: str, curves: Callable[..., Any]) -> None:
    mine, theirs = curves(name, lora_rank=4)
    assert theirs == pytest.approx(mine, rel=2e-6)
    assert mine[1:] != pytest.approx(curves(name)[0][1:], rel=1e-5)  # other than all weights do


@pytest.mark.parametrize(
    ("knobs", "tolerance"),
    [
        ({"precision": "bf16"}, 2e-6),
        ({"precision": "bf16-mixed"}, 2e-6),
        ({"precision": "bf16", "lora_rank": 4, "lora_targets": "attention"}, 2e-6),
        # norms round apart
        ({"precision": "bf16-mixed", "lora_rank": 4, "lora_targets": "all-linear+head"}, 5e-4),
        ({"optimizer": "adamw-8bit"}, 1e-4),  # Trainer keeps embeddings' state in 32 bits
        ({"optimizer": "adafactor"}, 1e-4),  # transformers has one of its own, of another eps
        ({"optimizer": "sgd"}, 2e-6),
        ({"activation_checkpointing": "full", "lora_rank": 4}, 2e-6),
        ({"activation_checkpointing": "alternate"}, 2e-6),
        ({"attention": "eager"}, 2e-6),
        ({"loss": "chunked"}, 2e-6),
    ],
)
def test_knobs_learn_the_same(
    knobs: dict[str, Any], tolerance: float, curves: Callable[..., Any]
) -> None:
    mine, theirs = curves("llama", **knobs)
    assert theirs == pytest.approx(mine, rel=tolerance)


def test_checkpointing_takes_effect(tmp_path: Path) -> None:
    setup = training_arguments(tmp_path, activation_checkpointing="alternate", model=make("llama"))
    trainer, _ = trained_by_trainer(setup, make("llama"), samples("llama"))
    assert [layer.gradient_checkpointing for layer in trainer.model.model.layers] == [True, False]


def training_arguments(
    tmp_path: Path, model: nn.Module | None = None, **knobs: Any
) -> TrainerSetup:
    return autofit.training_arguments(
        {**SIZES, **knobs}, model=model, output_dir=tmp_path, **OVERRIDES
    )


@pytest.mark.parametrize("quantization", ["int8", "nf4-dq"])
def test_quantised_weights_are_loaded_and_trained_beside(quantization: str, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "weights")
    knobs = {"quantization": quantization, "lora_rank": 4, "precision": "bf16"}
    setup = training_arguments(tmp_path, make("llama"), **knobs)
    assert setup.quantization_config is setup.model_kwargs["quantization_config"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", **setup.model_kwargs)
    trainer, losses = trained_by_trainer(setup, model, samples("llama"))
    assert len(losses) == STEPS
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert ("Linear8bitLt" if quantization == "int8" else "Linear4bit") in kinds
    assert {each.dtype for each in trainer.model.parameters() if each.requires_grad} == {
        torch.bfloat16
    }
    with pytest.raises(
        autofit.InputError, match="quantises frozen weights, and those of the model are not"
    ):
        setup.prepare(make("llama"))


def test_experts_are_adapted_but_not_quantised(tmp_path: Path) -> None:
    model = tiny.mixture_workload().model()
    knobs = {"lora_rank": 4, "lora_targets": "experts+q_proj", "precision": "bf16"}
    quantised = training_arguments(tmp_path, model, **knobs, quantization="nf4")
    assert quantised.notes == (
        "from_pretrained leaves the experts unquantised, which may no longer fit.",
    )
    adapted = training_arguments(tmp_path, model, **knobs).prepare(model)
    trained = {
        name.split(".")[6] for name, each in adapted.named_parameters() if each.requires_grad
    }
    assert trained == {"q_proj", "experts"}


def test_a_new_head_is_trained_whole_in_the_dtype_of_adapters(tmp_path: Path) -> None:
    model = make("bert-classifier")
    knobs = {"lora_rank": 4, "precision": "bf16-mixed", "lora_targets": "all-linear+head"}
    adapted = training_arguments(tmp_path, model, **knobs).prepare(model)
    trained = {name: each.dtype for name, each in adapted.named_parameters() if each.requires_grad}
    assert set(trained.values()) == {torch.float32}
    assert any("classifier.modules_to_save" in name for name in trained)
    assert adapted.get_base_model().bert.embeddings.word_embeddings.weight.dtype == torch.bfloat16


def test_a_loss_that_ignores_the_count_is_noticed(tmp_path: Path) -> None:
    config = XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=2, d_inner=64)
    model = XLNetLMHeadModel(config)
    with pytest.warns(UserWarning, match="ignores how many labels"):
        training_arguments(tmp_path).prepare(model)
    assert model.accepts_loss_kwargs is False
    assert model.training


def result(best: bool = True, source: dict[str, str] | None = None, **knobs: Any) -> Result:
    """A search of tiny-llama that found one config, or none."""
    config = autofit.Config({**SIZES, **knobs})
    found = Measurement(
        config, Outcome.FITS, step_seconds=StepSeconds(1, 1, 1), peak_bytes=PeakBytes(1)
    )
    return Result(
        model="tiny-llama",
        workload={"task": "causal-lm", "sequence_length": None, "effective_batch_size": 8},
        source={"kind": "preset", "model": "tiny-llama"} if source is None else source,
        hardware=tiny.CPU,
        budget=Budget(GIB, GIB),
        versions={},
        best=found if best else None,
        tiers={},
        trials=(),
        skipped={},
        stopped_by="trials",
        space_size=1,
        search_seconds=1.0,
    )


def test_a_result_and_its_file_say_the_same(tmp_path: Path) -> None:
    found = result(lora_rank=4, lora_targets="attention")
    (tmp_path / "result.yaml").write_text(found.to_yaml())
    setups = [
        autofit.training_arguments(given, output_dir=tmp_path)
        for given in (found, tmp_path / "result.yaml", SavedResult.load(tmp_path / "result.yaml"))
    ]
    for setup in setups:
        assert setup.arguments.per_device_train_batch_size == 2
        assert setup.arguments.use_cpu
        assert all("self_attn" in name for name in setup.peft_config.target_modules)
        assert setup.peft_config.task_type == "CAUSAL_LM"


CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the newer name first


def test_what_is_overridden_goes_first_and_is_said(tmp_path: Path) -> None:
    setup = autofit.training_arguments(
        {**SIZES, "activation_checkpointing": "full"},
        output_dir=tmp_path,
        per_device_train_batch_size=8,
        max_grad_norm=1.0,
        gradient_checkpointing=False,  # the name that transformers had before 5.23
    )
    name = next(each for each in CHECKPOINTING if hasattr(setup.arguments, each))
    assert setup.arguments.per_device_train_batch_size == 8
    assert setup.arguments.max_grad_norm == 1.0
    assert getattr(setup.arguments, name) is False
    assert setup.notes == (
        "per_device_train_batch_size: you set 8, where the config says 2.",
        f"{name}: you set False, where the config says True.",
    )


@pytest.mark.parametrize(
    ("given", "overrides", "message"),
    [
        (result(best=False), {}, "no config that was tried fits|no config of the space"),
        (17, {}, "a result is needed, or the path of a result.yaml, not 17"),
        ({"micro_batch_size": 2}, {}, "gradient_accumulation_steps must be a whole number"),
        ({**SIZES, "optimiser": "sgd"}, {}, "unknown knob 'optimiser'. Did you mean 'optimizer'"),
        ({**SIZES, "lora_rank": 4}, {}, "Give the model as model="),
        (
            SIZES,
            {"learning_rte": 1.0},
            "unknown training argument 'learning_rte'. Did you mean 'learning_rate'",
        ),
        (SIZES, {"optim": "adamx"}, "transformers refuses these training arguments"),
        (SIZES, {"model": nn.Linear(2, 2)}, "models of transformers, and this one is a torch"),
        (result(gradient_accumulation_steps=2), {}, "is not the effective batch of 8"),
    ],
)
def test_bad_input_is_one_sentence(
    given: Any, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(autofit.AutofitError, match=message):
        autofit.training_arguments(given, output_dir=tmp_path, **overrides)


def test_a_function_that_a_result_names_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef make(): ...\n")
    mine = result(
        lora_rank=8, source={"kind": "function", "function": f"{tmp_path / 'mine.py'}:make"}
    )
    with pytest.raises(autofit.InputError, match="Give the model as model="):
        autofit.training_arguments(mine, output_dir=tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_config_for_a_gpu_is_refused_without_one(tmp_path: Path) -> None:
    saved = tmp_path / "result.yaml"
    saved.write_text(result().to_yaml().replace("device: cpu", "device: cuda"))
    with pytest.raises(autofit.InputError, match="for a GPU, and there is no CUDA device here"):
        autofit.training_arguments(saved, output_dir=tmp_path)
    assert autofit.training_arguments(saved, output_dir=tmp_path, use_cpu=True).arguments.use_cpu


def test_several_devices_are_told_and_where_they_are_missing_it_is_said(tmp_path: Path) -> None:
    knobs = {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "data_parallel": "fsdp",
        "data_parallel_shard": 4,
    }
    setup = autofit.training_arguments(
        {**knobs, "reshard_after_forward": False}, output_dir=tmp_path
    )
    assert setup.arguments.fsdp is True
    assert setup.arguments.fsdp_config["reshard_after_forward"] is False
    note = setup.notes[-1]
    assert note.startswith(
        "this config is for 4 devices, and Trainer finds 1 here; start your script with torchrun"
    )
