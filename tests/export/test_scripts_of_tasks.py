"""Scripts whose loss is no model's own: they take autofit's steps, and read data as it does."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.data.options import DataOptions
from autofit.data.text import text_loader
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from tests.data.templates import CHATML, tokenizer_for
from tests.export.architectures import ARCHITECTURES
from tests.export.emitted import (
    check_same_steps,
    loaded,
    losses_of,
    losses_printed,
    module_of,
    saved_weights,
    setup_for,
    take_over,
)

Emit = Callable[..., str]

SPLIT = {"micro_batch_size": 2}
LORA = {"lora_rank": 4, "lora_targets": "all-linear"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {**SPLIT, "reference": "precomputed"}),
    ("dpo", {**SPLIT, "reference": "resident"}),
    ("dpo", {**LORA, **SPLIT, "reference": "adapter-off", "precision": "bf16-mixed"}),
    ("kto", {**SPLIT, "reference": "resident"}),
    ("kto", {**LORA, "reference": "adapter-off"}),
    ("orpo", SPLIT),
    ("simpo", {**LORA, **SPLIT}),
    ("reward", SPLIT),
    ("reward", {**LORA, **SPLIT}),
    ("rerank", {**LORA, **SPLIT}),
    ("distill", SPLIT),
    ("distill", {**LORA, **SPLIT, "teacher_precision": "nf4"}),
    ("embed", {}),
    ("embed", {**SPLIT, "precision": "bf16-mixed"}),
]

# transformers, peft and torchao warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("task", "knobs"), CASES)
def test_the_script_takes_the_same_steps_as_autofit(
    emit: Emit, tmp_path: Path, task: str, knobs: dict[str, Any]
) -> None:
    weights = saved_weights(task, ARCHITECTURES[task], tmp_path / "weights")
    teacher = saved_weights(task, ARCHITECTURES[task], tmp_path / "teacher", seed=1)
    asked = teacher if task == "distill" else None
    setup = setup_for(task, ARCHITECTURES[task], knobs, weights, asked)
    script = module_of(emit(task, **dict(setup.config)))
    script.reference = loaded(task, weights).eval()
    script.teacher = setup.frozen.get("teacher", loaded(task, teacher)).eval()
    check_same_steps(script, setup, weights)


@pytest.mark.parametrize(
    ("task", "options"),
    [("dpo", {"beta": 0.7}), ("simpo", {"beta": 1.5, "gamma": 0.25}), ("embed", {"scale": 5})],
)
def test_options_of_the_loss_are_constants_of_the_script(
    emit: Emit, tmp_path: Path, task: str, options: dict[str, float]
) -> None:
    weights = saved_weights(task, ARCHITECTURES[task], tmp_path / "weights")
    setup = setup_for(task, ARCHITECTURES[task], SPLIT, weights, loss_options=options)
    source = {"kind": "preset", "model": "tiny", "loss_options": options}
    script = module_of(emit(task, {"source": source}, **dict(setup.config)))
    script.reference = loaded(task, weights).eval()
    check_same_steps(script, setup, weights)


def test_a_script_is_not_written_for_another_loss(emit: Emit) -> None:
    source = {"kind": "preset", "model": "tiny", "loss_options": {"kind": "ipo"}}
    with pytest.raises(InputError, match="cannot be written for dpo with kind=ipo"):
        emit("dpo", {"source": source}, **SPLIT)


def test_scripts_are_clean_and_short(emit: Emit, tmp_path: Path) -> None:
    for number, (task, knobs) in enumerate(CASES):
        steps = 8 // knobs.get("micro_batch_size", 8)
        text = emit(task, **knobs, gradient_accumulation_steps=steps)
        assert len(text.splitlines()) < 300
        (tmp_path / f"{number}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "E,F"]
    checked = subprocess.run(
        [*ruff, "--line-length", "120", str(tmp_path)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout[:3000]


TEXTS = {
    "dpo": [
        {"prompt": "one and", "chosen": " two", "rejected": " three, four"},
        {"prompt": "", "chosen": "a longer answer", "rejected": "b"},
    ],
    "kto": [
        {"prompt": "one and", "completion": " two", "label": True},
        {"prompt": "three", "completion": ", four", "label": False},
        {"prompt": "5", "completion": " six", "label": True},
    ],
    "rerank": [
        {"query": "who", "passage": "me", "label": 1},
        {"query": "where", "passage": "over there", "label": 0},
    ],
    "embed": [
        {"anchor": "who", "positive": "me"},
        {"anchor": "where", "positive": "over there"},
    ],
    "distill": [{"text": "some text"}, {"text": "and some more, to be put one after the other"}],
}
CHATS = [
    {
        "prompt": [{"role": "user", "content": "hi"}],
        "chosen": [{"role": "assistant", "content": "hello"}],
        "rejected": [{"role": "assistant", "content": "go"}],
    }
]


@pytest.mark.parametrize(
    ("task", "rows"),
    [*((task, rows) for task, rows in TEXTS.items() if task != "distill"), ("dpo", CHATS)],
)
def test_rows_are_read_as_autofit_train_reads_them(
    emit: Emit, tmp_path: Path, task: str, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = tokenizer_for(CHATML)
    model = HuggingFaceModel("tiny", task, ARCHITECTURES[task])
    workload = huggingface_workload(model, sequence_length=64, effective_batch_size=len(rows))
    (expected,) = text_loader(workload, path, tokenizer, DataOptions())

    reference = {"reference": "precomputed"} if workload.precomputes else {}
    found = module_of(emit(task, **reference)).load_data(path, tokenizer)
    order = [rows_of(expected).index(row) for row in rows_of(found)]
    assert sorted(order) == list(range(len(rows)))
    for name in found:
        torch.testing.assert_close(expected[name][order], found[name], check_dtype=False)


def rows_of(batch: dict[str, torch.Tensor]) -> list[Any]:
    """What tells samples apart, without what pads them."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return [row[kept != 0].tolist() for row, kept in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("task", TEXTS)
def test_a_whole_script_runs(emit: Emit, tmp_path: Path, task: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, TEXTS[task] * 8)))
    weights = saved_weights(task, ARCHITECTURES[task], tmp_path / "weights")
    knobs: dict[str, Any] = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
    if task in ("dpo", "kto"):
        knobs["reference"] = "precomputed" if task == "dpo" else "resident"
    arguments = ["--data", path, "--weights", weights, "--steps", "3", "--log-every", "1"]
    if task == "distill":
        arguments += ["--teacher", weights]
        knobs["teacher_precision"] = "nf4"
    losses = losses_printed(emit(task, **knobs), *arguments, "--output", tmp_path / "trained")
    assert len(losses) == 3
    assert loaded(task, tmp_path / "trained")


def test_dropout_is_replayed(emit: Emit, tmp_path: Path) -> None:
    dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    architecture = {**ARCHITECTURES["embed"], **dropout}
    weights = saved_weights("embed", architecture, tmp_path)
    setup = setup_for("embed", architecture, SPLIT, weights)
    model = {"model_config": architecture}
    script = module_of(emit("embed", model, **dict(setup.config)))
    found = []
    for size in (2, 2):
        torch.manual_seed(3)
        trained = script.build_model(str(weights))
        take_over(trained, setup)
        torch.manual_seed(size)
        found.append(losses_of(script, trained, setup.workload.batch(8)))
    setup.close()
    assert found[0] == found[1]


def test_a_streamed_reference_is_left_to_autofit_train(emit: Emit) -> None:
    with pytest.raises(InputError, match=r"train\.py cannot express reference offloaded"):
        emit("dpo", reference="offloaded")


def test_several_devices_are_left_to_autofit_train(emit: Emit) -> None:
    with pytest.raises(InputError, match=r"train\.py cannot be written for dpo on several devices"):
        emit("dpo", data_parallel="ddp", data_parallel_replicate=2, data_parallel_shard=1)
