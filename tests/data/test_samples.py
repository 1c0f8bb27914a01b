"""Samples come as a batch: stacked, padded to the longest of them, or normalised from bytes."""

import pyarrow
import pytest
import torch

from autofit.data.samples import Pictures, Ragged, Stacked

NO = -100
IDS = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32)
SPANS = torch.tensor([[0, 3], [3, 4], [4, 6], [6, 6]])


def test_stacked_samples() -> None:
    samples = Stacked(
        {"x": torch.tensor([[1, 2], [3, 4], [5, 9]]), "labels": torch.tensor([[NO, 1], [1, NO], [NO, NO]])}
    )
    assert len(samples) == 3
    assert samples.batch(torch.tensor([2, 0]))["x"].tolist() == [[5, 9], [1, 2]]
    assert (samples.largest("x"), samples.largest("y")) == (9, None)
    assert samples.learnt(shifted=False).tolist() == [True, True, False]
    assert samples.learnt(shifted=True).tolist() == [True, False, False]
    assert samples.only(torch.tensor([False, True, True])).batch(torch.tensor([0]))["x"].tolist() == [[3, 4]]


def test_a_batch_is_padded_to_its_longest() -> None:
    samples = Ragged({"input_ids": IDS, "labels": IDS}, SPANS, pad_id=9)
    batch = samples.batch(torch.tensor([2, 0]))
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[5, 6, 9], [1, 2, 3]]
    assert batch["labels"].tolist() == [[5, 6, NO], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert samples.batch(torch.tensor([1]))["input_ids"].tolist() == [[4]]
    assert (samples.largest("input_ids"), samples.largest("labels")) == (9, 6)


def test_labels_of_whole_samples_are_not_padded() -> None:
    samples = Ragged({"input_ids": IDS}, SPANS, 0, {"labels": torch.tensor([7, 8, 9, 10])})
    assert samples.batch(torch.tensor([2, 0]))["labels"].tolist() == [9, 7]
    assert samples.learnt(shifted=False).tolist() == [True, True, True, False]
    kept = samples.only(torch.tensor([False, False, True, False]))
    assert kept.batch(torch.tensor([0]))["labels"].tolist() == [9]


@pytest.mark.parametrize(
    ("labels", "shifted", "plain"),
    [
        ([1, 2, 3, 4, 5, 6], [True, False, True, False], [True, True, True, False]),
        ([1, NO, NO, NO, NO, 6], [False, False, True, False], [True, False, True, False]),
        ([NO, NO, NO, 4, NO, NO], [False, False, False, False], [False, True, False, False]),
    ],
)
def test_samples_that_have_something_to_learn(labels: list[int], shifted: list[bool], plain: list[bool]) -> None:
    samples = Ragged({"input_ids": IDS, "labels": torch.tensor(labels)}, SPANS, 0)
    assert samples.learnt(shifted=True).tolist() == shifted
    assert samples.learnt(shifted=False).tolist() == plain


def test_pictures_are_normalised_by_channel() -> None:
    pixels = pyarrow.chunked_array([[bytes([0, 255, 51, 102])], [bytes([255, 0, 0, 0])]])
    mean, deviation = torch.tensor([0.0, 0.2]), torch.tensor([1.0, 0.5])
    samples = Pictures(pixels, torch.tensor([4, 5]), (2, 1, 2), mean, deviation)
    batch = samples.batch(torch.tensor([0]))
    assert batch["labels"].tolist() == [4]
    assert torch.allclose(batch["pixel_values"], torch.tensor([[[[0.0, 1.0]], [[0.0, 0.4]]]]), atol=1e-6)
    assert len(samples.batch(torch.tensor([1, 0]))["pixel_values"]) == len(samples) == 2
    assert (samples.largest("labels"), samples.largest("input_ids")) == (5, None)
