"""Batches whose samples are not the rows of dim 0 are counted, cut and repeated sample by sample."""

from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data.batch import repeat_to, sample_count, samples_of, split, tensors
from autofit.data.counts import counted_slices, loss_count
from tests import tiny

IMAGE = 5


def texts(*image_tokens: int) -> torch.Tensor:
    ids = torch.arange(10, 26).repeat(len(image_tokens), 1)
    for row, count in zip(ids, image_tokens, strict=True):
        row[1 : 1 + count] = IMAGE
    return ids


def packed_patches() -> dict[str, torch.Tensor]:
    """Three samples of one, no and two images; each token stands for four patches."""
    grid = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 2]])
    pixels = torch.arange(32.0).unsqueeze(1)
    return {"input_ids": texts(4, 0, 4), "pixel_values": pixels, "image_grid_thw": grid}


@pytest.mark.parametrize("types", [None, "mm_token_type_ids", "token_type_ids"])
def test_patches_go_with_the_tokens_of_their_images(types: str | None) -> None:
    batch = packed_patches()
    if types:
        batch[types] = (batch["input_ids"] == IMAGE).long()
    parts = list(split(batch, 1))
    assert [part["pixel_values"][:, 0].tolist() for part in parts] == [
        list(range(16)),
        [],
        list(range(16, 32)),
    ]
    assert [len(part["image_grid_thw"]) for part in parts] == [1, 0, 2]
    assert [len(part["input_ids"]) for part in parts] == [1, 1, 1]
    address = batch["pixel_values"].untyped_storage().data_ptr()
    assert {part["pixel_values"].untyped_storage().data_ptr() for part in parts} == {address}, (
        "views"
    )


def test_whole_images_go_with_their_tokens_too() -> None:
    batch = {
        "input_ids": texts(8, 4),
        "pixel_values": torch.arange(3.0).reshape(3, 1, 1, 1),
        "image_sizes": torch.eye(3),
    }
    first, second = split(batch, 1)
    assert first["pixel_values"].flatten().tolist() == [0, 1]
    assert second["pixel_values"].flatten().tolist() == [2]
    assert (len(first["image_sizes"]), len(second["image_sizes"])) == (2, 1)


def test_the_largest_sample_is_repeated() -> None:
    batch = packed_patches()
    batch["pixel_values"], batch["image_grid_thw"] = (
        torch.arange(48.0).unsqueeze(1),
        torch.tensor([[1, 8, 4], [1, 4, 4]]),
    )
    batch["input_ids"] = texts(8, 4)
    repeated = repeat_to(batch, 5)
    assert sample_count(repeated) == 5
    assert repeated["pixel_values"][:, 0].tolist() == list(range(32)) * 5
    assert torch.equal(repeat_to(batch, 2)["pixel_values"], batch["pixel_values"]), (
        "as many as there are: themselves"
    )


def test_positions_in_time_height_and_width_have_samples_along_dim_1() -> None:
    batch = {
        "input_ids": texts(0, 0),
        "position_ids": torch.arange(2 * 16).reshape(1, 2, 16).expand(3, 2, 16),
    }
    assert samples_of(batch, 1, 2)["position_ids"][0, 0, 0] == 16


def test_images_that_fit_no_tokens_are_refused_with_the_remedy() -> None:
    batch = packed_patches() | {"input_ids": texts(1, 1, 1, 1)}
    with pytest.raises(InputError, match=r"differ in size along dim 0.* say with split=") as caught:
        sample_count(batch)
    assert "a function of (batch, size)" in caught.value.remedy


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"class_labels": torch.full((n,), i), "boxes": torch.ones(n, 4)}
        for i, n in enumerate(counts)
    ]


DETECTION: dict[str, Any] = {
    "dict": {"pixel_values": torch.arange(3.0).reshape(3, 1, 1, 1), "labels": boxes(2, 0, 3)},
    "as many boxes as images": {"pixel_values": torch.zeros(3, 1, 2, 2), "labels": boxes(3, 3, 3)},
    "images and targets": ([torch.zeros(3, 4 + i, 4) for i in range(3)], boxes(1, 2, 3)),
    "samples": [{"image_id": torch.tensor(i), **each} for i, each in enumerate(boxes(1, 2, 2))],
    "under a name of one's own": {
        "x": torch.zeros(3, 1, 2, 2),
        "y": [{"boxes": torch.ones(2, 4)} for _ in range(3)],
    },
    "masks": {
        "pixel_values": torch.zeros(3, 1, 2, 2),
        "mask_labels": [torch.ones(n, 2, 2) for n in (3, 3, 3)],
    },
}


@pytest.mark.parametrize("name", DETECTION)
def test_lists_hold_one_for_each_image(name: str) -> None:
    batch = DETECTION[name]
    assert sample_count(batch) == 3
    parts = list(split(batch, 2))
    assert [sample_count(part) for part in parts] == [2, 1]
    assert sum(tensor.numel() for part in parts for tensor in tensors(part)) == sum(
        t.numel() for t in tensors(batch)
    )
    assert sample_count(repeat_to(batch, 7)) == 7
    assert type(parts[0]) is type(batch)


def test_labels_stay_beside_their_image() -> None:
    first, second = split(DETECTION["dict"], 2)
    assert [len(each["boxes"]) for each in first["labels"]] == [2, 0]
    assert second["labels"][0]["class_labels"].tolist() == [2, 2, 2]
    assert repeat_to(DETECTION["dict"], 4)["labels"][0]["boxes"].shape == (3, 4), "the most boxes"


def test_lists_of_tensors_with_the_samples_along_dim_0_stay_as_they_were() -> None:
    assert sample_count([torch.ones(4, 2), torch.ones(4)]) == 4
    assert sample_count([{"x": torch.ones(4, 2)}, {"y": torch.ones(4)}]) == 4
    assert sample_count([{"x": torch.ones(4, 2)}, {"x": torch.ones(4, 2)}]) == 4, (
        "two views of a sample"
    )


@pytest.mark.parametrize("bounds", [True, False])
def test_sequences_packed_in_a_row_are_samples(bounds: bool) -> None:
    batch = {
        "input_ids": torch.arange(9).unsqueeze(0),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]]),
    }
    if bounds:
        batch["cu_seqlens"] = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    first, second = split(batch, 2)
    assert first["input_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert second["input_ids"].tolist() == [[5, 6, 7, 8]]
    if bounds:
        assert (first["cu_seqlens"].tolist(), second["cu_seqlens"].tolist()) == ([0, 3, 5], [0, 4])
        assert first["cu_seqlens"].dtype is torch.int32
    longest = repeat_to(batch, 2)
    assert longest["position_ids"].tolist() == [[0, 1, 2, 3] * 2]


def graphs() -> dict[str, torch.Tensor]:
    """Two graphs of three and two nodes."""
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 4]])
    owners, classes = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([7, 8])
    features = torch.arange(5.0).unsqueeze(1)
    return {
        "x": features,
        "edge_index": edges,
        "edge_attr": torch.arange(4.0),
        "batch": owners,
        "y": classes,
    }


def test_graphs_keep_their_nodes_and_edges() -> None:
    first, second = split(graphs(), 1)
    assert first["edge_index"].tolist() == [[0, 1, 2], [1, 2, 0]]
    assert second["edge_index"].tolist() == [[0], [1]], "numbered from its own first node"
    assert (second["x"][:, 0].tolist(), second["edge_attr"].tolist(), second["y"].tolist()) == (
        [3, 4],
        [3],
        [8],
    )
    three = repeat_to(graphs(), 3)
    assert three["edge_index"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 0, 4, 5, 3, 7, 8, 6],
    ]
    assert three["batch"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert three["y"].tolist() == [7, 7, 7]


def test_a_graph_without_owners_is_one_sample() -> None:
    batch = {name: each for name, each in graphs().items() if name not in ("batch", "y")}
    assert sample_count(batch) == 1
    assert list(split(batch, 1)) == [batch]


def triples(batch: Any, size: int) -> list[Any]:
    """Samples of three rows."""
    return list(batch.split(3 * size))


def test_a_function_of_ones_own_splits_what_only_it_understands() -> None:
    batch = torch.arange(12.0)
    assert sample_count(batch, triples) == 4
    assert [part.tolist() for part in split(batch, 3, triples)] == [list(range(9)), [9, 10, 11]]
    assert samples_of(batch, 2, 4, triples).tolist() == [6, 7, 8, 9, 10, 11]
    assert repeat_to(batch, 2, triples).tolist() == [0, 1, 2, 3, 4, 5]
    workload = Workload(tiny.MLP, lambda n: batch, split=triples)
    assert loss_count(workload, batch) == 4
    assert [count for _, count in counted_slices(workload, batch, 3)] == [3, 1]
    with pytest.raises(InputError, match="a batch of 5 samples cannot be made from one of 4"):
        repeat_to(batch, 5, triples)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda batch, size: None, "split returned a NoneType, not a list of micro-batches"),
        (lambda batch, size: [], "split returned an empty list"),
        (lambda batch, size: 1 / 0, "split raised ZeroDivisionError"),
    ],
)
def test_what_a_function_of_ones_own_returns_is_checked(cut: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        sample_count(torch.ones(4), cut)
