"""The longest samples are found wherever they lie in the data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from autofit.core.workload import Workload
from autofit.data.samples import FileLoader, Ragged, Twins
from autofit.training import longest_batch
from autofit.training.workload import LargestBatch, Peek, training_workload
from tests import tiny

LENGTHS = [4, 4, 5, 5] * 5 + [9, 7]  # the longest lie behind what is looked at
PEEK = Peek(batches=2)
MODEL = tiny.MLP()


class Dataset(list[Any]):
    """A data set that counts what is read of it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def dataset(lengths: list[int] = LENGTHS) -> Dataset:
    return Dataset({"input_ids": [1] * length, "labels": 0} for length in lengths)


def look(data: Any, collate: Callable[..., Any] = padded, **options: Any) -> Workload:
    loader = DataLoader(data, batch_size=2, collate_fn=collate, **options)
    return training_workload(MODEL, loader, tiny.classify, peek=PEEK)


def test_the_longest_sample_of_a_data_set_is_found_behind_the_first_batches() -> None:
    workload = look(dataset())
    assert workload.sequence_length == 9
    assert workload.batch(4)["input_ids"].shape == (4, 9)
    assert workload.effective_batch_size == 2
    assert workload.notes == ()


@pytest.mark.parametrize("shuffle", [True, False])
def test_looking_moves_no_random_numbers(shuffle: bool) -> None:
    class Noisy(Dataset):
        def __getitem__(self, index: Any) -> Any:
            torch.rand(1)
            return super().__getitem__(index)

    torch.manual_seed(3)
    look(Noisy(dataset()), shuffle=shuffle)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert after == torch.rand(1)


def test_samples_of_one_shape_are_not_all_read() -> None:
    data = dataset([4] * 30)
    assert look(data).notes == ()
    assert data.read <= 6


def test_what_there_is_no_time_to_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_batch, "_SECONDS", -1.0)
    (note,) = look(dataset()).notes
    assert note.startswith("no more than 1 of 22 samples of the data set were read to find")


def test_lengths_that_texts_have_later_are_not_known() -> None:
    def tokenized(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return padded([{**sample, "input_ids": [1] * len(sample["text"])} for sample in samples])

    data = [{"text": "a" * length, "labels": 0} for length in LENGTHS]
    (note,) = look(data, tokenized).notes
    assert note.startswith("no more than 2 batches of the loader were read to find")


def test_a_data_set_that_only_workers_can_read_is_said() -> None:
    class Elsewhere(Dataset):
        def __getitem__(self, index: Any) -> Any:
            if self.read >= 4:
                raise OSError("no file was opened")
            return super().__getitem__(index)

    (note,) = look(Elsewhere(dataset())).notes
    assert note.startswith("no more than 2 batches of the loader were read to find")


def test_a_batch_that_joins_its_samples_has_as_many_as_are_long() -> None:
    def joined(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [len(sample["input_ids"]) for sample in samples]
        ids = torch.ones(1, sum(lengths), dtype=torch.long)
        positions = torch.cat([torch.arange(length) for length in lengths])
        return {"input_ids": ids, "position_ids": positions.view(1, -1), "labels": ids}

    workload = look(dataset(), joined)
    assert isinstance(workload.batch, LargestBatch)
    assert workload.batch.largest["input_ids"].shape == (1, 9 + 7)
    assert workload.notes == ()


def test_each_dimension_has_a_longest_sample_of_its_own() -> None:
    def batch(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        height = max(sample.shape[0] for sample in samples)
        width = max(sample.shape[1] for sample in samples)
        labels = torch.zeros(len(samples), dtype=torch.long)
        return {"pixels": torch.zeros(len(samples), height, width), "labels": labels}

    images = [torch.zeros(2, 2)] * 2 + [torch.zeros(3, 2)] * 10
    images += [torch.zeros(2, 9), torch.zeros(7, 2)]
    workload = look(images, batch)
    assert workload.batch(2)["pixels"].shape == (2, 7, 9)


def test_items_that_are_batches_are_compared_as_they_are() -> None:
    batches = [padded(dataset([length] * 2)) for length in (4, 5, 9, 4)]
    loader = DataLoader(Dataset(batches), batch_size=None)
    workload = training_workload(MODEL, loader, tiny.classify, peek=PEEK)
    assert workload.sequence_length == 9
    assert workload.notes == ()


def ragged(*lengths: int) -> Ragged:
    ends = torch.tensor(lengths).cumsum(0)
    spans = torch.stack([ends - torch.tensor(lengths), ends], dim=1)
    tokens = torch.ones(int(ends[-1]), dtype=torch.long)
    numbers = torch.zeros(len(lengths), dtype=torch.long)
    return Ragged({"input_ids": tokens}, spans, 0, {"labels": numbers})


def test_the_longest_sample_of_a_file_is_known() -> None:
    loader = FileLoader(ragged(*[4] * 20, 9, 5), 2)
    workload = training_workload(MODEL, loader, tiny.classify, peek=PEEK)
    assert workload.sequence_length == 9
    assert workload.notes == ()


def test_of_pairs_the_longest_text_counts() -> None:
    pairs = FileLoader(Twins(ragged(4, 4, 4, 4, 8, 4)), 2).longest()
    assert pairs is not None
    assert pairs["input_ids"].shape == (1, 2, 8)


def test_labels_of_their_own_have_a_length_of_their_own() -> None:
    texts = ragged(4, 9, 4)
    tokens = {**texts.tokens, "labels": torch.ones(20, dtype=torch.long)}
    apart = torch.tensor([[0, 2], [2, 4], [4, 20]])
    batch = FileLoader(Ragged(tokens, texts.spans, 0, label_spans=apart), 2).longest()
    assert batch is not None
    assert batch["input_ids"].shape == (2, 9)
    assert batch["labels"].shape == (2, 16)
