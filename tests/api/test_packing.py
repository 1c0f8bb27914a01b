"""Data decide whether a search is for packed or for padded samples, and all that follows does as it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from autofit.api.packing import with_data
from autofit.api.search import search
from autofit.core.errors import InputError
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.export.from_result import export
from autofit.models import resolve
from tests import tiny

ROWS = [{"prompt": "a", "completion": "b" * n} for n in (2, 3, 4, 30)]
EVEN = [{"prompt": "a", "completion": "b" * 8}] * 4


def model(folder: Path, architecture: str = "LlamaForCausalLM") -> str:
    described = {**tiny.LLAMA, "vocab_size": 256, "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)


def of_data(folder: Path, rows: list[Any], *, architecture: str = "LlamaForCausalLM") -> Workload:
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = resolve(model(folder, architecture), sequence_length=32, effective_batch_size=4)
    return with_data(found, folder / "data.jsonl", None, tolerance=0.03, trusted=False)


def test_samples_of_many_lengths_are_packed(tmp_path: Path) -> None:
    found = of_data(tmp_path, ROWS)
    assert found.packing
    assert found.padding == pytest.approx(1 - (3 + 4 + 5 + 31) / (4 * 31))
    assert found.notes[-1] == (
        "data.jsonl: samples have 3 to 31 tokens, 11 in the mean; padded, 65 % of a batch is padding: samples are "
        "packed, and see those before them."
    )


@pytest.mark.parametrize("rows", [EVEN, ROWS[1:]])
def test_samples_of_one_length_or_too_few_to_tell_are_padded(tmp_path: Path, rows: list[Any]) -> None:
    found = of_data(tmp_path, rows)
    assert found.packing is False
    assert found.notes[-1].endswith("samples are padded.")


def test_plain_text_is_always_packed(tmp_path: Path) -> None:
    assert of_data(tmp_path, [{"text": "a" * 31}] * 4).packing


def test_data_are_for_named_language_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="named language models, and the task is sequence-classification"):
        of_data(tmp_path, ROWS, architecture="LlamaForSequenceClassification")
    with pytest.raises(InputError, match="data and weights are for a model given by name"):
        search(tiny.mlp_workload(), data=tmp_path / "data.jsonl")


@pytest.mark.usefixtures("shared_zygote")
def test_the_result_says_it_and_exports_and_train_py_do_it(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    found = search(
        model(tmp_path),
        seq_len=32,
        effective_batch=4,
        data=data,
        device="cpu",
        mem=1,
        trials=1,
        fast=True,
        set={"precision": ("fp32",)},
        out=tmp_path / "run",
    )
    assert found.best and found.best.tokens_per_second
    assert found.workload["packing"]
    (note,) = (each for each in found.notes if "tokens a second count" in each)
    assert note.startswith("Samples are packed: all ")
    saved = SavedResult.load(tmp_path / "run" / "result.yaml")
    assert saved.workload == found.workload
    assert "sample_packing: true" in export(saved, to="axolotl").text
    script = (tmp_path / "run" / "train.py").read_text()
    assert "All samples in a row" in script
