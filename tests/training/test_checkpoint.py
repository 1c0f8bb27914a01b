"""Checkpoints bring a run exactly to where it stood, and are refused where they do not belong."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny
import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.core.hyperparameters import Hyperparameters
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup import Setup
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.loop import train_step
from autofit.training.run import StepReport, train

BATCHES = [tuple(tensor[:4] for tensor in tiny.conv_workload().batch(4 + step)) for step in range(4)]


def run(config: dict[str, Any]) -> Setup:
    """A run with dropout and BatchNorm, so that random numbers and buffers matter."""
    torch.manual_seed(0)
    chosen = Hyperparameters(lr=1e-2, schedule="cosine")
    model = nn.Sequential(tiny.ConvNet(), nn.Dropout(0.2))
    return build(tiny.conv_workload(4), config, tiny.CPU, model=model, hyperparameters=chosen)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer": "adamw-8bit"},
        {"optimizer": "sgd", "precision": "bf16"},
        {"optimizer": "adafactor"},
        {"optimizer": "adamw-8bit", "optimizer_in_backward": True},
        {"lora_rank": 2, "precision": "fp16-mixed"},
    ],
    ids=str,
)
def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(tmp_path: Path, config: dict[str, Any]) -> None:
    whole = run(config)

    def save_in_the_middle(report: StepReport) -> None:
        if report.step == 1:
            checkpoint.save(whole, tmp_path, 2)

    reports = train(whole, BATCHES, steps=4, callbacks=[save_in_the_middle])
    second = run(config)
    train_step(second, BATCHES[3])  # all that a checkpoint holds is another now
    start = checkpoint.load(second, tmp_path)
    assert start == 2
    assert train(second, BATCHES[start:], steps=4, first_step=start) == reports[2:]
    for one, other in zip(second.model.state_dict().items(), whole.model.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1]), one[0]


def test_the_micro_batch_may_be_another(tmp_path: Path) -> None:
    checkpoint.save(run({"micro_batch_size": 4}), tmp_path, 1)
    assert checkpoint.load(run({"micro_batch_size": 2}), tmp_path) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"lora_rank": 4},
        {"lora_rank": 2, "optimizer": "sgd"},
        {"lora_rank": 2, "lora_alpha": 64},
        {"lora_rank": 2, "quantization": "nf4"},
        {},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    checkpoint.save(run({"lora_rank": 2}), tmp_path, 1)
    with pytest.raises(InputError, match=r"is of another model or config\. Give the config it was made with\."):
        checkpoint.load(run(config), tmp_path)


def test_a_directory_without_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no checkpoint to resume in .*\. Leave out resume"):
        checkpoint.load(run({}), tmp_path)


@pytest.mark.parametrize("content", [b"", b"half a checkpo", b"PK\x03\x04half an archive"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / checkpoint.FILE_NAME).write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read: .*Train again without resume\."):
        checkpoint.load(run({}), tmp_path)


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2]])
def test_a_file_of_another_program(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / checkpoint.FILE_NAME)
    with pytest.raises(InputError, match="is of another model or config"):
        checkpoint.load(run({}), tmp_path)


def test_the_former_checkpoint_is_replaced_in_one_move(tmp_path: Path) -> None:
    setup = run({})
    for step in (1, 2):
        assert checkpoint.save(setup, tmp_path / "new", step) == tmp_path / "new" / checkpoint.FILE_NAME
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == [checkpoint.FILE_NAME]
    assert checkpoint.load(setup, tmp_path / "new") == 2


# The trained model.


def test_a_plain_module_is_saved_as_safetensors(tmp_path: Path) -> None:
    setup = run({})
    checkpoint.save_model(setup, tmp_path / "out")
    read = nn.Sequential(tiny.ConvNet(), nn.Dropout(0.2))
    safetensors.torch.load_model(read, tmp_path / "out" / "model.safetensors")
    assert all(map(torch.equal, read.state_dict().values(), setup.model.state_dict().values()))


def test_a_transformers_model_is_saved_as_its_own_library_reads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    workload = tiny.llama_workload()
    setup = build(workload, {}, tiny.CPU, model=workload.model())
    checkpoint.save_model(setup, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = workload.batch(2)
    assert torch.equal(read(**batch).logits, setup.model(**batch).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks transformers
def test_an_adapter_is_saved_as_peft_reads_it(tmp_path: Path) -> None:
    from peft import PeftModel

    workload = tiny.llama_workload()
    torch.manual_seed(0)
    base = workload.model()
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    setup = build(workload, {"lora_rank": 4}, tiny.CPU, model=base, hyperparameters=Hyperparameters(lr=1e-2))
    for _ in range(2):
        train_step(setup, workload.batch(4))
    checkpoint.save_model(setup, tmp_path)
    fresh = workload.model()
    fresh.load_state_dict(weights)
    batch = workload.batch(2)
    plain = fresh(**batch).logits.detach()
    read = PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(read(**batch).logits, setup.model(**batch).logits)
    assert not torch.allclose(read(**batch).logits, plain)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_head_that_was_trained_whole_is_saved_with_its_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    factory = HuggingFaceModel("tiny", "sequence-classification", tiny.LLAMA, {"kind": "directory", "path": "tiny"})
    workload = huggingface_workload(factory, sequence_length=16, effective_batch_size=4)
    base = workload.model()
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    setup = build(workload, {"lora_rank": 4}, tiny.CPU, model=base, hyperparameters=Hyperparameters(lr=1e-2))
    for _ in range(2):
        train_step(setup, workload.batch(4))
    checkpoint.save_model(setup, tmp_path)
    fresh = workload.model()
    fresh.load_state_dict(weights)
    batch = workload.batch(2)
    read = PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(read(**batch).logits, setup.model(**batch).logits)
    assert setup.model.peft_config["default"].modules_to_save is None  # the living model is left as it is
