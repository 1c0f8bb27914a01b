"""From a result to another tool's files: what is taken from the model, and what is written where."""

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import autofit
from autofit.cli import main
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, NothingFitsError
from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import Result, SavedResult
from autofit.export.from_result import export_all, short_names
from autofit.techniques import all_techniques
from autofit.training.meta_model import meta_model_from
from tests import tiny

OFF = {technique.name: technique.off for technique in all_techniques()}
SIZES = {"micro_batch_size": 4, "gradient_accumulation_steps": 4}
HARDWARE = {
    "device": "cpu",
    "name": "a test's CPU",
    "memory_gib": 8.0,
    "budget_gib": 2.0,
    "margin": 0.05,
}


def saved(
    path: Path, source: dict[str, Any] | None = None, task: str = "causal-lm", **knobs: Any
) -> Path:
    """A result.yaml of the smallest preset."""
    data = {
        "autofit": 1,
        "model": "tiny-llama",
        "workload": {"task": task, "sequence_length": 128, "effective_batch_size": 16},
        "source": {"kind": "preset", "model": "tiny-llama"} if source is None else source,
        "hardware": HARDWARE,
        "versions": {"autofit": "0.1.0", "torch": "2.13.0"},
        "config": {**OFF, **SIZES, **knobs},
        "measured": {
            "tokens_per_second": 1000.0,
            "step_seconds": {"median": 2.0, "low": 1.9, "high": 2.1},
        },
    }
    file = path / "result.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def test_layers_get_adapters_by_the_names_that_the_model_has(tmp_path: Path) -> None:
    made = autofit.export(saved(tmp_path, lora_rank=8, lora_targets="attention"), to="trl")
    assert made.keys["lora_targets"]["lora_target_modules"] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    ]
    made = autofit.export(saved(tmp_path, lora_rank=8, lora_targets="all-linear+head"), to="trl")
    assert "lm_head" not in made.keys["lora_targets"]["lora_target_modules"]
    assert any(each.knob == "lora_targets" for each in made.departures)


def test_short_names_stand_for_all_wanted_layers_and_no_others() -> None:
    names = [
        "a.0.attention.query",
        "a.0.attention.output.dense",
        "a.0.output.dense",
        "a.1.attention.query",
        "query",
    ]
    wanted = ["a.0.attention.query", "a.1.attention.query", "a.0.attention.output.dense"]
    assert short_names(wanted, names) == ("attention.query", "attention.output.dense")
    assert short_names([], names) == ()
    modules = [name for name, _ in meta_model_from(tiny.llama()).named_modules()]
    linear = [name for name in modules if name.endswith("_proj")]
    assert set(short_names(linear, modules)) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_weights_are_those_of_the_source(tmp_path: Path) -> None:
    def weights(source: dict[str, Any]) -> Any:
        file = saved(tmp_path, source)
        return yaml.safe_load(autofit.export(file, to="trl").files["trl.yaml"])[
            "model_name_or_path"
        ]

    assert weights({"kind": "preset", "model": "llama-3.1-8b"}) == "meta-llama/Llama-3.1-8B"
    assert weights({"kind": "preset", "model": "tiny-llama"}) == "path/to/weights"
    assert weights({}) == "path/to/weights"


def test_a_living_models_adapters_are_named_by_kind(tmp_path: Path) -> None:
    made = autofit.export(saved(tmp_path, {}, lora_rank=8, lora_targets="all-linear"), to="trl")
    assert made.keys["lora_targets"]["lora_target_modules"] == ["all-linear"]


def test_files_are_written_by_the_name_that_is_asked_for(tmp_path: Path) -> None:
    file = saved(tmp_path)
    autofit.export(file, to="trl", output=tmp_path / "new" / "mine.yaml")
    assert yaml.safe_load((tmp_path / "new" / "mine.yaml").read_text())["max_length"] == 128
    autofit.export(file, to="transformers", output=tmp_path / "own.yaml")
    assert '"own.yaml"' in (tmp_path / "train_transformers.py").read_text()
    with pytest.raises(InputError, match="cannot be written"):
        autofit.export(file, to="trl", output=file / "x.yaml")


WEIRD = (
    'we"ird.yaml',
    "a\\b\nc'.yaml",
    "-x.yaml",
    "$(id).yaml",
    "\u2028import os\u2028#",
    "n" * 250,
    "\u6a21" * 83,
)


@pytest.mark.parametrize("name", WEIRD)
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    file = saved(tmp_path)
    autofit.export(file, to="transformers", output=tmp_path / name)
    assert yaml.safe_load((tmp_path / name).read_text())["output_dir"] == "output"
    calls = ast.walk(ast.parse((tmp_path / "train_transformers.py").read_text()))
    named = [
        each.args[0]
        for each in calls
        if isinstance(each, ast.Call) and "with_name" in ast.dump(each.func)
    ]
    assert [ast.literal_eval(each) for each in named] == [name]

    lines = autofit.export(file, to="trl", output=tmp_path / name).text.split("\n")
    command = next(line for line in lines if line.startswith("#   trl sft"))[1:].partition(
        " (with"
    )[0]
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True
    ).stdout
    assert read.decode().split("\0")[3] == (f"./{name}" if name.startswith("-") else name)


def test_a_name_within_the_text_of_others_is_left_alone(tmp_path: Path) -> None:
    file = saved(tmp_path)
    file.write_text(
        file.read_text().replace("model: tiny-llama\nsource", "model: trl.yaml\nsource")
    )
    text = autofit.export(file, to="trl", output=tmp_path / "mine.yaml").text
    assert "Training trl.yaml with" in text
    assert "--config mine.yaml" in text


def test_no_file_of_an_export_takes_the_name_of_another(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another file of this export"):
        autofit.export(
            saved(tmp_path), to="transformers", output=tmp_path / "train_transformers.py"
        )


def test_a_directory_is_refused_and_a_home_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path)
    with pytest.raises(
        InputError, match=r"\. cannot be written: Is a directory\. Choose another --output"
    ):
        autofit.export(file, to="trl", output=".")
    monkeypatch.setenv("HOME", str(tmp_path))
    autofit.export(file, to="trl", output="~/x.yaml")
    assert (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"precision": "bf17"}, r"unknown value for precision 'bf17'\. Did you mean 'bf16'"),
        ({"lora_rank": -4}, "lora_rank cannot be -4"),
        ({"lora_rank": "eight"}, "lora_rank cannot be 'eight'"),
    ],
)
def test_values_that_no_knob_takes_are_refused(
    tmp_path: Path, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        autofit.export(saved(tmp_path, **knobs), to="trl")


def test_a_knob_of_ones_own_is_told_of_where_it_is_not_registered(tmp_path: Path) -> None:
    made = autofit.export(saved(tmp_path, ema=0.5), to="trl")
    assert [each.knob for each in made.departures if each.knob == "ema"] == ["ema"]


def test_strict_refuses_what_departs(tmp_path: Path) -> None:
    file = saved(tmp_path)
    assert autofit.export(file, to="transformers", strict=True).departures == ()
    with pytest.raises(
        InputError, match=r"TRL cannot run all of this config as measured: loss standard: "
    ):
        autofit.export(file, to="trl", strict=True)


def test_older_tools_are_told_by_their_own_keys(tmp_path: Path) -> None:
    file = saved(tmp_path, activation_checkpointing="alternate", activation_offload="cpu")
    now = yaml.safe_load(autofit.export(file, to="transformers").files["training_arguments.yaml"])
    assert now["activation_checkpointing_kwargs"] == {
        "use_reentrant": False,
        "every_n_layers": 2,
        "offload": True,
    }
    made = autofit.export(file, to="transformers", tool_version="5.16.2")
    before = yaml.safe_load(made.files["training_arguments.yaml"])
    assert before["gradient_checkpointing_kwargs"] == {"use_reentrant": False, "every_n_layers": 2}
    assert "offloads nothing before transformers 5.17" in " ".join(map(str, made.departures))


def result_of(best: Measurement | None) -> Result:
    """A search's result in memory."""
    return Result(
        model="tiny",
        workload={"task": "causal-lm", "sequence_length": 16, "effective_batch_size": 2},
        source={},
        hardware=tiny.CPU,
        budget=Budget(2**30, 2**30),
        versions={},
        best=best,
        tiers={},
        trials=(),
        skipped={},
        stopped_by="space",
        space_size=0,
        search_seconds=0.0,
    )


def test_a_result_without_a_best_config_is_not_exported() -> None:
    with pytest.raises(NothingFitsError):
        autofit.export(result_of(None), to="trl")


def test_a_saved_result_keeps_the_versions_it_was_measured_with(tmp_path: Path) -> None:
    result = SavedResult.load(saved(tmp_path))
    assert result.versions["torch"] == "2.13.0"
    assert "torch 2.13.0" in autofit.export(result, to="trl").files["trl.yaml"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["export", *arguments])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_the_command_prints_the_file_and_tells_departures_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(saved(tmp_path, loss="fused"))
    code, out, err = run(capsys, file, "--to", "trl")
    assert code == 0
    assert yaml.safe_load(out)["per_device_train_batch_size"] == 4
    assert err.startswith("loss fused: ")
    code, out, err = run(capsys, file, "--to", "transformers")
    assert "# file: train_transformers.py" in out
    output = tmp_path / "x.yaml"
    code, out, err = run(capsys, file, "--to", "trl", "--output", str(output))
    assert (code, out) == (0, "")
    assert output.exists()


def test_the_command_as_json_and_its_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(saved(tmp_path, loss="fused"))
    code, out, _ = run(capsys, file, "--to", "trl", "--json")
    data = json.loads(out)
    assert (code, data["schema"], data["tool"]) == (0, 1, "trl")
    assert [each["knob"] for each in data["departures"]] == ["loss"]
    code, out, _ = run(capsys, file, "--to", "trl", "--strict", "--json")
    assert (code, list(json.loads(out))) == (2, ["schema", "error"])
    code, out, _ = run(capsys, file, "--to", "axolot", "--json")
    assert code == 2
    assert run(capsys, "--to", "trl")[0] == 2


def test_the_list_of_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run(capsys, "--to", "list")
    assert code == 0
    assert "transformers" in out
    assert "5.23.0" in out
    rows = json.loads(run(capsys, "--to", "list", "--json")[1])["tools"]
    assert {"name", "title", "versions", "tasks", "run"} == set(rows[0])


def test_a_result_is_exported_for_every_tool_that_can_train_it(tmp_path: Path) -> None:
    knobs = {**OFF, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "lora_rank": 8}
    result = result_of(Measurement(Config({**knobs, "lora_targets": "all-linear"}), Outcome.FITS))
    messages: list[str] = []
    export_all(result, tiny.llama(), tmp_path, notify=messages.append)
    assert not messages
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "trl.yaml",
        "accelerate.yaml",
        "peft/adapter_config.json",
        "train_transformers.py",
    } <= names
    assert not {"torchtune.yaml", "torchtitan_config.py"} & names  # which know only models by name
    adapters = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert set(adapters["target_modules"]) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_a_tool_that_refuses_a_result_is_reported(tmp_path: Path) -> None:
    knobs = {
        **OFF,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "precision": "fp16-mixed",
    }
    messages: list[str] = []
    result = result_of(Measurement(Config(knobs), Outcome.FITS))
    export_all(result, tiny.llama(), tmp_path, notify=messages.append)
    assert "not exported to transformers: Trainer runs fp16-mixed on a GPU only." in messages
