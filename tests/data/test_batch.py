"""Batches of every shape people give are counted, cut and put together again without loss."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data.batch import (
    labels_of,
    map_tensors,
    repeat_to,
    sample_count,
    samples_of,
    split,
    tensors,
)
from autofit.data.counts import loss_count
from tests import tiny

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    note: str
    size: int = dataclasses.field(init=False, default=7)


KINDS = {
    "tensor": lambda x, y: x,
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: OrderedDict(x=x, y=y),
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named tuple": lambda x, y: Pair(x, y),
    "dataclass": lambda x, y: Sample(x, "kept"),
    "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "nested": lambda x, y: {
        "inputs": [x, Pair(y, None)],
        "deep": {"er": Sample(x, "kept")},
        "word": "kept",
        "n": 3,
    },
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def batch_of(kind: str, samples: int, width: int = 3) -> Any:
    x = torch.arange(samples * width, dtype=torch.float32).reshape(samples, width)
    return KINDS[kind](x, torch.arange(samples))


def joined(slices: list[Any]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*map(tensors, slices), strict=True)]


@every_kind
def test_samples_are_counted(kind: str) -> None:
    assert sample_count(batch_of(kind, 5)) == 5


@every_kind
@given(samples=st.integers(1, 20), size=st.integers(1, 25))
def test_the_slices_put_together_are_the_batch(kind: str, samples: int, size: int) -> None:
    batch = batch_of(kind, samples)
    slices = list(split(batch, size))
    assert [sample_count(each) for each in slices[:-1]] == [size] * (len(slices) - 1)
    assert 1 <= sample_count(slices[-1]) <= size
    assert all(map(torch.equal, joined(slices), tensors(batch)))
    assert all(type(each) is type(batch) for each in slices)


@every_kind
def test_slices_are_views(kind: str) -> None:
    batch = batch_of(kind, 4)
    (whole,) = {tensor.untyped_storage().data_ptr() for tensor in tensors(batch)[:1]}
    assert {tensors(each)[0].untyped_storage().data_ptr() for each in split(batch, 1)} == {whole}


@every_kind
@given(have=st.integers(1, 6), samples=st.integers(1, 20))
def test_repeating_gives_exactly_as_many_and_only_samples_of_the_batch(
    kind: str, have: int, samples: int
) -> None:
    batch = batch_of(kind, have)
    repeated = repeat_to(batch, samples)
    assert sample_count(repeated) == samples
    for tensor, source in zip(tensors(repeated), tensors(batch), strict=True):
        assert all(torch.equal(row, source[index % have]) for index, row in enumerate(tensor))


def test_what_is_no_tensor_is_passed_through() -> None:
    batch = batch_of("nested", 4)
    cut = samples_of(batch, 1, 3)
    assert (cut["word"], cut["n"], cut["inputs"][1].y, cut["deep"]["er"].note) == (
        "kept",
        3,
        None,
        "kept",
    )
    assert torch.equal(cut["inputs"][1].x, torch.tensor([1, 2]))
    assert cut["deep"]["er"].size == 7


def test_the_batch_itself_is_not_changed() -> None:
    batch = batch_of("dict", 4)
    before = {key: tensor.clone() for key, tensor in batch.items()}
    mapped = map_tensors(batch, lambda tensor: tensor + 1)
    assert all(torch.equal(batch[key], before[key]) for key in batch)
    assert torch.equal(mapped["x"], before["x"] + 1)


def test_a_mapping_that_cannot_be_made_from_a_dict_becomes_one() -> None:
    mapped = map_tensors(defaultdict(list, x=torch.ones(2)), lambda tensor: tensor * 2)
    assert mapped == {"x": mapped["x"]}
    assert torch.equal(mapped["x"], torch.full((2,), 2.0))
    assert torch.equal(
        map_tensors(MappingProxyType({"x": torch.ones(2)}), torch.neg)["x"], -torch.ones(2)
    )


def test_numbers_in_tensors_belong_to_every_slice() -> None:
    batch = {"x": torch.ones(4, 2), "temperature": torch.tensor(0.5)}
    assert [float(each["temperature"]) for each in split(batch, 3)] == [0.5, 0.5]
    assert float(repeat_to(batch, 9)["temperature"]) == 0.5


def test_tensors_that_disagree() -> None:
    message = (
        r"the tensors of a batch differ in size along dim 0: \[3, 4\]\. Put the samples along dim 0"
    )
    with pytest.raises(InputError, match=message):
        sample_count({"x": torch.ones(3), "y": torch.ones(4)})


@pytest.mark.parametrize("batch", [{}, [], "text", 3, None, {"x": [1, 2]}, torch.tensor(1.0)])
def test_batches_without_samples(batch: object) -> None:
    with pytest.raises(InputError, match="holds no tensor with samples along dim 0"):
        sample_count(batch)


@pytest.mark.parametrize("wrap", [dict, BatchEncoding, lambda items: type("Batch", (), items)()])
def test_labels_are_found_by_their_name(wrap: Any) -> None:
    labels = torch.ones(3)
    assert labels_of(wrap({"labels": labels})) is labels
    assert labels_of(wrap({"labels": [1, 2]})) is None
    assert labels_of(wrap({"targets": labels})) is None
    assert labels_of((labels, labels)) is None


def workload(**changes: Any) -> Workload:
    return Workload(model=tiny.MLP, batch=lambda n: n, **changes)


TOKENS = torch.tensor([[5, -100, 7, -100], [-100, 2, 3, 4], [9, -100, -100, -100]])


def test_causal_labels_are_counted_shifted() -> None:
    assert loss_count(workload(task="causal-lm"), {"labels": TOKENS}) == 1 + 3 + 0


def test_labels_that_come_shifted_are_counted_as_they_are() -> None:
    batch = {"labels": TOKENS, "shift_labels": torch.tensor([[1, -100], [-100, -100]])}
    assert loss_count(workload(task="causal-lm"), batch) == 1


def test_other_labels_are_counted_where_they_are_valid() -> None:
    assert loss_count(workload(task="masked-lm"), {"labels": TOKENS}) == 2 + 3 + 1
    assert loss_count(workload(), {"labels": torch.tensor([3, -100, 1])}) == 2


def test_without_integer_labels_samples_count() -> None:
    assert loss_count(workload(), {"labels": torch.ones(3, 4)}) == 3
    assert loss_count(workload(), (torch.ones(5, 2), torch.ones(5))) == 5


def test_a_count_of_the_users_own_comes_first() -> None:
    counted = workload(task="causal-lm", count=lambda batch: torch.tensor(11))
    assert loss_count(counted, {"labels": TOKENS}) == 11


@given(
    st.lists(st.lists(st.sampled_from([-100, 1]), min_size=6, max_size=6), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_the_counts_of_the_slices_add_up(rows: list[list[int]], size: int) -> None:
    batch = {"labels": torch.tensor(rows)}
    for task in ("causal-lm", "masked-lm"):
        slices = [loss_count(workload(task=task), each) for each in split(batch, size)]
        assert sum(slices) == loss_count(workload(task=task), batch)


def test_lists_of_texts_are_cut_and_repeated_like_the_samples() -> None:
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "classes": ["cat", "dog"]}
    slices = list(split(batch, 3))
    assert [each["names"] for each in slices] == [["a", "b", "c"], ["d"]]
    assert all(each["classes"] == ["cat", "dog"] for each in slices), "not one for each sample"
    assert repeat_to(batch, 6)["names"] == ["a", "b", "c", "d", "a", "b"]


def test_texts_of_a_data_loader_are_cut_with_their_samples() -> None:
    """It makes a tuple of the texts of samples that are tuples; one of sizes is no list of samples."""
    samples = [(letter, torch.tensor(number)) for number, letter in enumerate("abcd")]
    (texts, numbers) = next(iter(DataLoader(samples, batch_size=4)))
    batch = {"texts": texts, "numbers": numbers, "size": (8, 8, 8, 8)}
    parts = list(split(batch, 3))
    assert [part["texts"] for part in parts] == [("a", "b", "c"), ("d",)]
    assert [part["size"] for part in parts] == [(8, 8, 8, 8)] * 2
    assert repeat_to(batch, 6)["texts"] == ("a", "b", "c", "d", "a", "b")
