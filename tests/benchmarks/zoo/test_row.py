"""A dozen families that differ as much as can be: what is predicted of each is what real steps take."""

from pathlib import Path

import pytest

from autofit.models import resolve
from autofit.probe import LocalExecutor
from autofit.training.build import build
from benchmarks.estimate_memory import peaks
from benchmarks.zoo.families import Family, of_transformers, written
from benchmarks.zoo.row import LEVERS, SETTINGS, answer_of, plain, predicted_peak, searched, tried
from benchmarks.zoo.table import is_sentence
from tests import tiny

FAMILIES = {
    "transformers/llama/causal-lm": "qlora",
    "transformers/qwen3_moe/causal-lm": "lora",
    "transformers/mamba2/causal-lm": "full",
    "transformers/vit/image-classification": "qlora",
    "transformers/t5/seq2seq": "lora",
    "transformers/whisper/speech-seq2seq": "full",
    "transformers/llava/image-text-to-text": "lora",
    "plain/sequences/lstm/custom": "full",
    "plain/images/gan/custom": "full",
    "plain/objectives/message_passing/custom": "lora",
    "plain/objectives/dpo/custom": "full",
}


def family_of(key: str) -> Family:
    library, name, task = key.rsplit("/", 2)
    if library != "transformers":
        return Family(library, name, task)
    return next(each for each in of_transformers() if each.key == key)


@pytest.mark.parametrize(("key", "setting"), FAMILIES.items(), ids=str)
def test_predicted_memory_is_what_real_steps_take(key: str, setting: str, tmp_path: Path) -> None:
    model, options = written(family_of(key), tmp_path)
    workload = resolve(model, **options)
    peak, answer = predicted_peak(workload, tiny.CPU, SETTINGS[setting])
    assert answer.outcome == "works", answer.message
    real, _ = peaks(workload, SETTINGS[setting], tiny.CPU)
    assert peak == pytest.approx(real, rel=1e-3)


def test_a_row_holds_all_that_is_tried(
    executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"lora": SETTINGS["lora"]}
    monkeypatch.setattr("benchmarks.zoo.row.SETTINGS", settings)
    monkeypatch.setattr(
        "benchmarks.zoo.row.LEVERS", {name: LEVERS[name] for name in ("lora", "checkpointing")}
    )
    model, options = written(Family("plain/objectives", "perceptron", "custom"), tmp_path)
    row = plain(tried(model, executor, options=options))
    figures = row["settings"]["lora"]
    assert figures["predicted"] == pytest.approx(figures["probed"], rel=1e-3)
    assert row["levers"]["lora"]["outcome"] == "works"
    assert row["levers"]["checkpointing"]["outcome"] == "refused"  # so the setting does without
    assert is_sentence(row["levers"]["checkpointing"]["message"])
    assert row["search"] is None


def test_a_search_is_told_from_its_answer(executor: LocalExecutor, tmp_path: Path) -> None:
    model, options = written(Family("plain/objectives", "perceptron", "custom"), tmp_path)
    found = searched(model, executor, options=options, command=False)
    assert found == {"search": {"outcome": "works", "message": ""}, "command": None}


def test_what_is_refused_is_told_from_what_fails(tmp_path: Path) -> None:
    model, _ = written(Family("plain/objectives", "perceptron", "custom"), tmp_path)
    assert answer_of(lambda: build(resolve(model), {}, tiny.CPU)).outcome == "works"
    refused = answer_of(lambda: build(resolve(model), {"quantization": "nf4"}, tiny.CPU))
    assert (refused.outcome, is_sentence(refused.message)) == ("refused", True)
    failed = answer_of(lambda: 1 // 0)
    assert failed.outcome == "fails"
    assert failed.message.endswith("ZeroDivisionError: integer division or modulo by zero\n")
