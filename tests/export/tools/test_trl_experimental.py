"""Trainers of TRL's experimental package train three steps from the exported YAML and its script."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.data.templates import CHATML, tokenizer_for
from tests.export.architectures import ARCHITECTURES
from tests.export.emitted import saved_weights
from tests.export.sources import LORA, source

TOOL = tool_named("trl")
ROWS: dict[str, dict[str, Any]] = {
    "distill": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello there"},
        ]
    },
    "orpo": {"prompt": "one", "chosen": " two", "rejected": " three, four"},
}
ROWS["simpo"] = ROWS["orpo"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "knobs"), [("distill", {}), ("orpo", LORA), ("simpo", {})])
def test_the_script_trains(
    task: str, knobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")
    architecture = ARCHITECTURES[task] | {"vocab_size": 512}
    weights = saved_weights(task, architecture, tmp_path / "weights")
    tokenizer_for(CHATML).save_pretrained(weights)
    (tmp_path / "data").mkdir()
    rows = [json.dumps(ROWS[task])] * 24
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))

    others = {"weights": str(weights), "teacher": str(weights), "sequence_length": 64}
    files = dict(write(TOOL, source("cpu", task, others, **knobs)).files)
    keys = yaml.safe_load(files["trl.yaml"])
    keys |= {"dataset_name": str(tmp_path / "data"), "output_dir": str(tmp_path / "output")}
    keys |= {"max_steps": 3, "logging_steps": 1, "report_to": "none"}
    if task == "distill":
        keys |= {"packing": False, "activation_offloading": False}
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(keys))
    (tmp_path / "train_trl.py").write_text(files["train_trl.py"])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["train_trl.py", "--config", "trl.yaml"])
    with contextlib.redirect_stdout(io.StringIO()):
        made = runpy.run_path("train_trl.py", run_name="__main__")
    losses = [row["loss"] for row in made["trainer"].state.log_history if "loss" in row]
    assert len(losses) == 3
    assert (tmp_path / "output").is_dir()


def test_the_command_is_that_of_the_script_and_all_logits_are_said() -> None:
    made = write(TOOL, source(task="simpo", **LORA, loss="chunked"))
    assert "python train_trl.py --config trl.yaml" in made.text
    assert "from trl.experimental.cpo import CPOConfig, CPOTrainer" in made.text
    (said,) = [each for each in made.departures if each.knob == "loss"]
    assert "holds the logits of all tokens" in said.instead
