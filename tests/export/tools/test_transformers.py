"""transformers: its own parser takes the YAML, and the script trains a tiny model as it stands."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from datasets import Dataset
from transformers import HfArgumentParser, TrainingArguments

from autofit.core.errors import InputError
from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests import tiny
from tests.export.sources import CASES, source

TOOL = tool_named("transformers")


# whose own parser reads the YAML here
INSTALLED = {"versions": {"transformers": transformers.__version__}}
RENAMED = hasattr(TrainingArguments, "activation_checkpointing")


def exported(**knobs: Any) -> Export:
    return write(TOOL, source("cpu", "causal-lm", INSTALLED, **knobs))


def parsed(text: str, path: Path) -> TrainingArguments:
    """By the parser of transformers; our check adds that no number came as text."""
    file = path / "training_arguments.yaml"
    file.write_text(text)
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(file)
    for name in ("learning_rate", "weight_decay", "max_grad_norm"):
        assert isinstance(getattr(arguments, name), float)
    return arguments


@pytest.mark.parametrize("case", CASES)
def test_its_own_parser_takes_every_case(case: str, tmp_path: Path) -> None:
    made = exported(**CASES[case])
    arguments = parsed(made.files["training_arguments.yaml"], tmp_path)
    assert arguments.per_device_train_batch_size == 2
    checkpointing = (
        arguments.activation_checkpointing if RENAMED else arguments.gradient_checkpointing
    )
    assert checkpointing is (CASES[case].get("activation_checkpointing") == "full")
    assert arguments.torch_compile is ("compile" in CASES[case])
    assert arguments.bf16 is (CASES[case]["precision"] == "bf16-mixed")
    compile(made.files["train_transformers.py"], "train_transformers.py", "exec")


def test_its_own_parser_refuses_a_wrong_key(tmp_path: Path) -> None:
    text = exported().files["training_arguments.yaml"]
    with pytest.raises(ValueError, match="gradient_checkpoints"):
        parsed(f"{text}\ngradient_checkpoints: true\n", tmp_path)
    with pytest.raises(AssertionError):
        parsed(text.replace("2.0e-05", "1e-4"), tmp_path)


def test_what_arguments_have_no_name_for_stands_in_the_script() -> None:
    script = exported(**CASES["qlora"], lora_alpha=8, lora_dropout=0.1).files[
        "train_transformers.py"
    ]
    assert 'bnb_4bit_quant_type="nf4"' in script
    assert 'bnb_4bit_compute_dtype="bfloat16"' in script
    assert "r=16" in script
    assert "lora_alpha=8" in script
    assert "lora_dropout=0.1" in script
    assert "parameter.data.to(torch.bfloat16)" in script
    compiled = exported(compile="default", activation_checkpointing="budget-0.5")
    assert (
        'os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "1"'
        in compiled.files["train_transformers.py"]
    )
    assert "activation_memory_budget = 0.5" in compiled.files["train_transformers.py"]
    assert not compiled.departures
    eager = exported(attention="eager").files["train_transformers.py"]
    assert 'attn_implementation="eager"' in eager


def test_scripts_are_about_thirty_lines() -> None:
    for case in CASES:
        script = exported(**CASES[case]).files["train_transformers.py"].splitlines()
        assert len([line for line in script if not line.startswith("#")]) <= 40


def test_classifiers_train_their_heads_whole() -> None:
    given = source("cpu", "sequence-classification", {"heads": ("classifier",)}, **CASES["lora"])
    script = write(TOOL, given).files["train_transformers.py"]
    assert 'modules_to_save=["classifier"]' in script
    assert "AutoModelForSequenceClassification" in script
    assert "model.accepts_loss_kwargs = False" in script
    assert "task_type" not in script


def test_a_config_that_trainer_refuses_is_refused() -> None:
    with pytest.raises(InputError, match="fp16-mixed on a GPU only"):
        exported(precision="fp16-mixed")


@pytest.mark.filterwarnings("ignore")
def test_the_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights"
    from transformers import AutoModelForCausalLM, LlamaConfig

    AutoModelForCausalLM.from_config(LlamaConfig.from_dict(tiny.LLAMA)).save_pretrained(weights)
    rows = [{"input_ids": [1] * 16, "labels": [1] * 16} for _ in range(8)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    others = {**INSTALLED, "weights": str(weights), "sequence_length": 16}
    made = write(
        TOOL,
        source("cpu", "causal-lm", others, precision="bf16", lora_rank=4, lora_targets="attention"),
    )
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    settings = yaml.safe_load((tmp_path / "training_arguments.yaml").read_text())
    settings |= {"num_train_epochs": 1, "output_dir": str(tmp_path / "output")}
    (tmp_path / "training_arguments.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_transformers.py", "data"])
    runpy.run_path("train_transformers.py", run_name="__main__")
    adapters = json.loads((tmp_path / "output" / "adapter_config.json").read_text())
    assert set(adapters["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
