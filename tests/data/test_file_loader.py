"""A path and a task become a loader, by what lies at the path and what the model takes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data.file_loader import file_loader
from autofit.data.options import DataOptions
from autofit.data.samples import FileLoader
from autofit.models.tasks.text import RandomTokens
from tests import tiny
from tests.data.letters import lines

DATA = Path(__file__).parents[2] / "examples" / "data"
TASKS = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq", "image-classification")


def loader(
    path: Path, *, task: str = "causal-lm", length: int | None = 64, **options: Any
) -> FileLoader:
    workload = Workload(
        model=torch.nn.Identity,
        batch=lambda n: {"pixel_values": torch.zeros(n, 1, 2, 2)},
        task=task,
        sequence_length=length,
        effective_batch_size=4,
    )
    return file_loader(workload, path, tokenizer=None, options=DataOptions(**options))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("alice.txt", "causal-lm"),
        ("alice.txt", "masked-lm"),
        ("reviews.jsonl", "sequence-classification"),
    ],
)
def test_the_shipped_examples_are_read(name: str, task: str) -> None:
    found = loader(DATA / name, task=task)
    assert len(found) >= 10
    batch = next(iter(found))
    assert {len(tensor) for tensor in batch.values()} == {4}


def test_images_of_the_shape_that_the_model_takes(tmp_path: Path) -> None:
    torch.save(
        {"pixel_values": torch.ones(4, 1, 2, 2), "labels": torch.arange(4)}, tmp_path / "a.pt"
    )
    (batch,) = loader(tmp_path / "a.pt", task="image-classification")
    assert sorted(batch["labels"].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("task", TASKS)
def test_a_path_that_is_not_there(tmp_path: Path, task: str) -> None:
    with pytest.raises(InputError, match=r"the data file .*a\.txt is not there\. Check the path\."):
        loader(tmp_path / "a.txt", task=task)


@pytest.mark.parametrize("task", TASKS)
def test_a_directory_of_something_else(tmp_path: Path, task: str) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00")
    with pytest.raises(
        InputError,
        match=r"a\.bin is no text: it holds bytes of zero|no directories with images|Pillow",
    ):
        loader(tmp_path, task=task)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("task", ["sequence-classification", "seq2seq", "image-classification"])
def test_packing_is_for_language_models(task: str, packing: bool) -> None:
    with pytest.raises(
        InputError, match=f"packing and padding are for language models, and the task is {task}"
    ):
        loader(DATA / "reviews.jsonl", task=task, packing=packing)


def test_batches_train_the_model_they_are_for() -> None:
    """The shape of a real batch is that of the synthetic ones that were measured."""
    model = tiny.llama_workload(sequence_length=16)
    found = file_loader(model, DATA / "alice.txt", tokenizer=None, options=DataOptions())
    real, synthetic = next(iter(found)), model.batch(4)
    assert {name: tensor.shape for name, tensor in real.items()} == {
        name: synthetic[name].shape for name in ("input_ids", "labels")
    }


def test_what_a_forward_asks_for_beside_tokens_is_zero() -> None:
    workload = Workload(
        model=torch.nn.Identity,
        batch=RandomTokens("causal-lm", 64, 300, zeros=("token_type_ids",)),
        task="causal-lm",
        sequence_length=64,
        effective_batch_size=4,
    )
    batch = next(
        iter(file_loader(workload, DATA / "alice.txt", tokenizer=None, options=DataOptions()))
    )
    assert torch.equal(batch["token_type_ids"], torch.zeros(4, 64, dtype=torch.long))


def test_a_task_without_files_is_trained_in_python() -> None:
    with pytest.raises(
        InputError, match=r"autofit train reads no files for object-detection\. Train it in Python"
    ):
        loader(DATA / "alice.txt", task="object-detection")


def test_what_is_left_out_of_rows_is_noted(tmp_path: Path) -> None:
    row = {"text": "junk", "prompt": "what is", "completion": " hello"}
    found = loader(lines(tmp_path, row))
    assert "read of each row: prompt, completion; left out: text." in found.notes
    (batch,) = found.in_order()
    assert bytes(batch["labels"][batch["labels"] != -100].tolist()).startswith(b" hello")


def test_files_that_are_no_images_are_noted(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("L", (2, 2)).save(tmp_path / "a" / "a.png")
    (tmp_path / "a" / "b.txt").write_text("no image")
    found = loader(tmp_path, task="image-classification")
    assert found.notes == (
        f"left out, no image: 1 file, the first of them {tmp_path / 'a' / 'b.txt'}.",
    )
