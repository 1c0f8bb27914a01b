"""Data decide whether a search is for packed or for padded samples, and all that follows does as it says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit import techniques
from autofit.api.packing import with_data
from autofit.api.search import search
from autofit.core.capacity import capacity_note
from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.options import search_options
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.data.batch import sample_count
from autofit.data.file_loader import file_loader
from autofit.data.options import DataOptions
from autofit.export.from_result import export
from autofit.models import resolve
from autofit.training.inspect import inspect_workload
from autofit.tuning.space import space_for
from tests import tiny
from tests.estimate.traced import AMPERE, peak, traced, tracked
from tests.tolerances import LOSS

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
    told = found.description()
    assert (told["data"], told["form"]) == (str(tmp_path / "data.jsonl"), "prompt+completion")
    assert found.notes[-1] == (
        "data.jsonl: samples have 3 to 31 tokens, 11 in the mean; padded, 65 % of a batch is padding: samples are "
        "packed, and do not see one another."
    )


@pytest.mark.parametrize("rows", [EVEN, ROWS[1:]])
def test_samples_of_one_length_or_too_few_to_tell_are_padded(
    tmp_path: Path, rows: list[Any]
) -> None:
    found = of_data(tmp_path, rows)
    assert found.packing is False
    assert found.notes[-1].endswith("samples are padded.")


def test_plain_text_is_always_packed(tmp_path: Path) -> None:
    found = of_data(tmp_path, [{"text": "a" * 31}] * 4)
    assert (found.packing, found.document_tokens) == (True, None)


def test_a_step_of_packed_samples_learns_what_one_of_them_alone_does(tmp_path: Path) -> None:
    found = of_data(tmp_path, [{"prompt": "ab", "completion": "c" * n} for n in (2, 8, 16)] * 6)
    assert found.document_tokens == 11
    torch.manual_seed(0)
    built, losses = found.model(), []
    for packing in (True, False):
        whole = dataclasses.replace(found, effective_batch_size=18)
        options = DataOptions(packing, apart=True)
        loader = file_loader(whole, tmp_path / "data.jsonl", tokenizer=None, options=options)
        batch = loader.samples.batch(torch.arange(len(loader.samples)))
        assert sample_count(batch) == (6 if packing else 18)
        losses.append(built(**batch).loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=LOSS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_probes_are_of_packed_samples_and_are_predicted(tmp_path: Path, attention: str) -> None:
    found, knobs = of_data(tmp_path, ROWS), {"micro_batch_size": 2, "attention": attention}
    assert found.batch(1)["position_ids"].max() == found.document_tokens - 1
    real = tracked(found, knobs)
    assert peak(traced(found, **knobs)) == pytest.approx(real, abs=8)  # a number that is read
    assert real > tracked(of_data(tmp_path, EVEN), knobs)


def test_what_cannot_keep_samples_apart_is_refused(tmp_path: Path) -> None:
    found = of_data(tmp_path, ROWS)
    config = techniques.canonicalize({"attention": "flash", "precision": "bf16"}, found, AMPERE)
    assert "use sdpa" in str(techniques.refuse(config, found, AMPERE))


PAIRS = [{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in (2, 3, 4, 30)]


def test_preferences_are_padded_and_their_lengths_are_said(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS))
    found = resolve(model(tmp_path), task="dpo", sequence_length=32, effective_batch_size=4)
    found = with_data(found, tmp_path / "data.jsonl", None, tolerance=0.03, trusted=False)
    assert found.packing is None
    assert found.padding == pytest.approx(1 - (3 + 4 + 5 + 31 + 4 * 2) / (4 * 2 * 31))
    assert found.description()["data"] == str(tmp_path / "data.jsonl")
    assert found.notes[-1] == (
        "data.jsonl: samples have 2 to 31 tokens, 6 in the mean; padded, 79 % of a batch is padding."
    )


def test_data_are_for_named_language_models(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"named language models.*and the task is sequence-classification"
    ):
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
    assert saved.source == {"kind": "directory", "path": str(tmp_path), "data": str(data)}
    assert "sample_packing: true" in export(saved, to="axolotl").text
    script = (tmp_path / "run" / "train.py").read_text()
    assert "All samples in a row" in script


OF_EACH_RANK = 2 * (
    4 * (32 + 32) + 3 * (32 + 128)
)  # in two layers: attention's four, the MLP's three


@pytest.mark.parametrize(
    ("tokens", "rank"),
    [(2 * 8 * OF_EACH_RANK, 8), (2 * 8 * OF_EACH_RANK + 1, 16), (10**9, 256), (None, 32)],
)
def test_the_rank_is_the_smallest_that_holds_the_data(
    tmp_path: Path, tokens: int | None, rank: int
) -> None:
    found = of_data(tmp_path, EVEN)
    assert found.data_tokens == 4 * 9
    traits = inspect_workload(found, AMPERE, None)
    assert traits.adapter_parameters == OF_EACH_RANK

    found = dataclasses.replace(found, traits=traits, data_tokens=tokens)
    assert space_for(search_options(), found, AMPERE).knobs["lora_rank"] == (rank, 0)
    assert space_for(search_options(space="lora"), found, AMPERE).knobs["lora_rank"] == (rank,)
    config = Config(lora_rank=rank, lora_targets="all-linear")
    note = capacity_note(found, config)
    if tokens is None:
        assert note is None
    else:
        assert note and note.startswith(f"LoRA trains {rank * OF_EACH_RANK:,} parameters")
        assert note.endswith("can learn more of them.") == (rank == 256)
    asked = search_options(set={"lora_rank": 4})
    assert space_for(asked, found, AMPERE).knobs["lora_rank"] == (4,)
