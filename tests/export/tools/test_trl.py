"""TRL: `trl sft --config` reads the YAML, its arguments make the objects that the run is made from."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.export.sources import ATTENTION, CASES, LINEAR, source

TOOL = tool_named("trl")


def parsed(path: Path, text: str) -> Any:
    """(SFTConfig, LoraConfig, BitsAndBytesConfig), as `trl sft` makes them; what is left over is for accelerate."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")
    from accelerate.commands.launch import launch_command_parser
    from trl.scripts.sft import make_parser

    file = path / "trl.yaml"
    file.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TRL says of Liger's kernels
        _, training, model, _, left = make_parser(prog="trl sft").parse_args_and_config(
            ["--config", str(file)], return_remaining_strings=True
        )
    launch_command_parser().parse_args([*left, "sft.py"])
    return training, trl.get_peft_config(model), trl.get_quantization_config(model), model


@pytest.mark.parametrize("case", CASES)
def test_its_own_parser_takes_every_case(case: str, tmp_path: Path) -> None:
    knobs = CASES[case]
    installed = {"versions": {"transformers": transformers.__version__}}
    made = write(TOOL, source("cpu", "causal-lm", installed, **knobs))
    training, lora, quantization, model = parsed(tmp_path, made.files["trl.yaml"])
    assert training.gradient_checkpointing is (knobs.get("activation_checkpointing") == "full")
    assert training.bf16 is (knobs["precision"] == "bf16-mixed")
    assert model.dtype == ("float32" if case in ("compiled", "ddp") else "bfloat16")
    assert training.torch_compile is (case == "compiled")
    assert training.max_length == 2048
    assert (lora is not None) is ("lora_rank" in knobs)
    if lora is not None:
        assert (lora.r, lora.lora_alpha, lora.lora_dropout, set(lora.target_modules)) == (
            16,
            32,
            0.0,
            set(LINEAR),
        )
    assert (quantization is not None) is ("quantization" in knobs)
    if quantization is not None:
        assert quantization.bnb_4bit_quant_type == "nf4"
        assert str(quantization.bnb_4bit_compute_dtype) == "torch.bfloat16"
        assert training.optim == "adamw_bnb_8bit"


@pytest.mark.parametrize(
    ("form", "learnt"),
    [("text", (False, False)), ("prompt+completion", (False, True)), ("messages", (True, False))],
)
def test_the_data_of_the_search_are_read_and_learnt_alike(
    form: str, learnt: tuple[bool, bool], tmp_path: Path
) -> None:
    made = write(TOOL, source("cpu", others={"data": "/data/rows.jsonl", "form": form}))
    training, *_ = parsed(tmp_path, made.files["trl.yaml"])
    assert (training.assistant_only_loss, training.completion_only_loss) == learnt
    keys = yaml.safe_load(made.files["trl.yaml"])
    assert keys["datasets"] == [{"path": "json", "data_files": "/data/rows.jsonl"}]
    assert "dataset_name" not in keys


@pytest.mark.parametrize("wrong", ["max_seq_length: 512", "optim: adamv", "lora_r: four"])
def test_its_own_parser_refuses_what_is_wrong(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)):
        parsed(tmp_path, f"{write(TOOL, source('cpu')).files['trl.yaml']}\n{wrong}\n")


def test_checkpointing_goes_by_the_names_of_the_transformers_it_was_measured_with() -> None:
    before = source(
        "cuda",
        "causal-lm",
        {"versions": {"transformers": "5.17.0"}},
        activation_checkpointing="selective",
    )
    keys = write(TOOL, before).keys["activation_checkpointing"]
    assert keys == {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "selective": True},
    }


def departures(**knobs: Any) -> dict[str, bool]:
    return {each.knob: each.may_not_fit for each in write(TOOL, source(**knobs)).departures}


def test_its_loss_is_never_that_of_the_full_logits() -> None:
    assert departures() == {"loss": False}
    assert departures(loss="chunked") == {}
    assert departures(loss="fused") == {"loss": False}


def test_where_its_chunks_take_more_than_was_measured_is_said() -> None:
    # the head's gradient is made in float32
    assert departures(precision="bf16", loss="chunked") == {"loss": True}
    assert departures(precision="bf16") == {"loss": False}
    on_cpu = write(TOOL, source("cpu", loss="chunked")).departures
    assert [(each.knob, each.may_not_fit) for each in on_cpu] == [("loss", True)]


def test_what_it_does_otherwise_is_named() -> None:
    lora = CASES["lora"]
    assert departures(**lora, loss="chunked") == {"precision": True}  # adapters in float32
    assert departures(**{**lora, "precision": "bf16-mixed"}, loss="chunked") == {}
    assert departures(**CASES["qlora"], loss="chunked") == {}
    assert (
        departures(**{**lora, "lora_targets": "all-linear+head"}, loss="chunked")["lora_targets"]
        is False
    )
    assert departures(**lora, lora_alpha=4.5, loss="chunked")["lora_alpha"] is False
    assert departures(activation_checkpointing="selective", loss="chunked") == {
        "activation_checkpointing": False
    }
    assert departures(optimizer_offload="cpu", loss="chunked") == {"optimizer_offload": True}


def test_off_is_written_out_where_its_defaults_are_on() -> None:
    keys = write(TOOL, source()).keys
    assert keys["activation_checkpointing"] == {"activation_checkpointing": False}
    assert keys["precision"] == {"dtype": "float32", "bf16": False, "fp16": False, "tf32": False}
    assert keys["attention"] == {"attn_implementation": "sdpa"}


def test_offloading_takes_the_option_that_goes_with_checkpointing() -> None:
    bare = write(TOOL, source(activation_offload="cpu"))
    assert bare.keys["activation_offload"] == {"activation_offloading": True}
    both = write(TOOL, source(activation_offload="cpu", activation_checkpointing="full"))
    assert (
        both.keys["activation_checkpointing"]["activation_checkpointing_kwargs"]["offload"] is True
    )
    assert both.keys["activation_offload"] == {"activation_offloading": False}


def test_an_adapter_on_the_head_is_left_out() -> None:
    made = write(TOOL, source(lora_rank=8, lora_targets="attention"))
    assert made.keys["lora_targets"]["lora_target_modules"] == list(ATTENTION)
    head = write(TOOL, source(lora_rank=8, lora_targets="all-linear+head"))
    assert head.keys["lora_targets"]["lora_target_modules"] == list(LINEAR)
