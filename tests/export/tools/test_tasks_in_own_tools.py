"""LLaMA-Factory, ms-swift and TRL train three steps of each task from what is exported for them.

`pytest -m tools -n 0 tests/export/tools/test_tasks_in_own_tools.py`; a minute a task, beside two
environments; TRL is in that of the tests. test_trl_experimental.py trains what TRL has no command for.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autofit.core.tasks import TASKS
from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.data.templates import CHATML, tokenizer_for
from tests.export.architectures import ARCHITECTURES
from tests.export.emitted import saved_weights
from tests.export.sources import LORA, source
from tests.export.tools.environments import ENVIRONMENTS, environment_variables, made

pytestmark = [pytest.mark.tools, pytest.mark.timeout(3600)]

STEPS = 3
LENGTH = 128
ADAPTED = {**LORA, "precision": "fp32"}
ROWS = 24
LOGS = {"llamafactory": "trainer_log.jsonl", "msswift": "logging.jsonl"}
PAIR = {"prompt": "one", "chosen": " two", "rejected": " three, four"}
ANSWER = {"prompt": "one", "completion": " two"}
FACTORY = [
    (task, knobs)
    for task in TASKS
    if "llamafactory" in TASKS[task].tools
    for knobs in ({}, ADAPTED)
]
SWIFT = [
    (task, knobs)
    for task in TASKS
    if "msswift" in TASKS[task].tools
    for knobs in ({}, ADAPTED)
    # rerank has rows of another form; the layers named for adapters are Llama's
    if task != "rerank" and not (knobs and task == "sequence-classification")
]


TRL = [
    (task, knobs)
    for task in TASKS
    if "trl" in TASKS[task].tools and "." not in TASKS[task].stages.get("trl", ".")
    for knobs in ({}, ADAPTED)
    if not TASKS[task].generated
]


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | Exception]:
    """The interpreter of each tool, or why it cannot be installed here."""
    found: dict[str, Path | Exception] = {"trl": Path(sys.executable)}
    for name in ("llamafactory", "msswift"):
        folder = tmp_path_factory.mktemp(name) / "environment"
        try:
            found[name] = made(ENVIRONMENTS[name], folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            found[name] = error
    return found


@pytest.mark.parametrize(
    ("tool", "task", "knobs"),
    [
        *(("llamafactory", task, knobs) for task, knobs in FACTORY),
        *(("msswift", task, knobs) for task, knobs in SWIFT),
        *(("trl", task, knobs) for task, knobs in TRL),
    ],
)
def test_it_trains_three_steps(
    environments: dict[str, Path | Exception],
    tool: str,
    task: str,
    knobs: dict[str, Any],
    tmp_path: Path,
) -> None:
    python = environments[tool]
    if isinstance(python, Exception):
        pytest.skip(f"{tool} cannot be installed here: {python}")

    weights = saved_weights(task, ARCHITECTURES[task] | {"vocab_size": 512}, tmp_path / "weights")
    tokenizer_for(CHATML).save_pretrained(weights)
    others = {"weights": str(weights), "teacher": str(weights), "sequence_length": LENGTH}
    export = write(tool_named(tool), source("cpu", task, others, **knobs))
    keys = yaml.safe_load(next(iter(export.files.values())))
    keys |= {"max_steps": STEPS, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
    keys |= {"output_dir": str(tmp_path / "output")}

    if tool == "llamafactory":
        keys |= _data_of_llamafactory(task, tmp_path)
        module = ["llamafactory.cli", "train"]
    elif tool == "trl":
        keys |= _data_of_trl(task, tmp_path)
        module = ["trl.cli.main", TASKS[task].stages[tool], "--config"]
    else:
        keys |= _data_of_msswift(task, tmp_path)
        stage = TASKS[task].stages.get(tool, "sft")
        module = ["swift.cli.main", stage]
    (tmp_path / "tool.yaml").write_text(yaml.safe_dump(keys))

    done = subprocess.run(
        [python, "-m", *module, "tool.yaml"],
        cwd=tmp_path,
        env={**environment_variables(), "DISABLE_VERSION_CHECK": "1", "USE_HF": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if tool == "trl":  # which keeps no log
        losses = [float(value) for value in re.findall(r"'loss': '?([^',]+)", done.stdout)]
    else:
        (log,) = (tmp_path / "output").rglob(LOGS[tool])
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        losses = [float(row["loss"]) for row in rows if "loss" in row]
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))


def _data_of_llamafactory(task: str, folder: Path) -> dict[str, Any]:
    """Rows in its own form, and the keys that name them."""
    described: dict[str, Any] = {"file_name": "rows.json"}
    if task == "kto":
        rows = [{**ANSWER, "label": number % 2 == 0} for number in range(ROWS)]
        described["columns"] = {"prompt": "prompt", "response": "completion", "kto_tag": "label"}
    else:
        rows = [dict(PAIR) for _ in range(ROWS)]
        described["ranking"] = True
        described["columns"] = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}

    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": described}))
    # it is imported where no sound is, too
    (folder / "torchaudio.py").write_text('__version__ = "0"\n')
    return {"dataset": "rows", "dataset_dir": str(folder)}


def _data_of_trl(task: str, folder: Path) -> dict[str, Any]:
    """Rows in its own form, and the keys that name them."""
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        row: dict[str, Any] = PAIR
        if task == "kto":
            row = {**ANSWER, "label": number % 2 == 0}
        rows.append(row)

    data = folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"dataset_name": str(data)}


def _data_of_msswift(task: str, folder: Path) -> dict[str, Any]:
    """Rows in its own form, and the keys that name them."""
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        chat = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": f"number {number}"},
        ]
        row: dict[str, Any] = {"messages": chat}
        if task == "sequence-classification":
            row = {"messages": chat[:1], "label": number % 2}
        elif task == "kto":
            row["label"] = number % 2 == 0
        elif task != "distill":
            row["rejected_response"] = "three, four"
        rows.append(row)

    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = {"dataset": str(folder / "rows.jsonl"), "model_type": "llama", "template": "default"}
    if task == "distill":
        keys["teacher_model_type"] = "llama"
    return keys
