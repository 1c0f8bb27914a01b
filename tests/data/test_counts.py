"""What a loss may average over, found in batches of any structure."""

import pytest
import torch

from autofit.core.workload import EACH, Count
from autofit.data.counts import candidates, counted, paths

LABELS = torch.tensor([[1, 2, -100, -100], [3, 0, 4, -100]])
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
BATCH = {
    "ids": LABELS.clamp(min=0),
    "labels": LABELS,
    "mask": MASK,
    "weights": torch.tensor([0.5, 0.25]),
}
BOXES = {"x": torch.ones(2, 3), "labels": [torch.ones(2, 4), torch.ones(5, 4)]}


@pytest.mark.parametrize(
    ("count", "number", "words"),
    [
        (Count(), 2, "samples"),
        (Count("sum"), 2, "a sum over samples"),
        (Count("unequal", ("labels",)), 5, "batch['labels'] != -100"),
        (Count("unequal", ("labels",), columns="next"), 3, "batch['labels'][:, 1:] != -100"),
        (Count("unequal", ("labels",), columns="earlier"), 5, "batch['labels'][:, :-1] != -100"),
        (Count("unequal", ("mask",), 0), 5, "batch['mask'] != 0"),
        (
            Count("unequal", ("ids",), 0, mask=("mask",)),
            4,
            "batch['ids'] != 0 where batch['mask'] != 0",
        ),
        (Count("total", ("weights",)), 0.75, "the sum of batch['weights']"),
        (Count("elements", ("ids",)), 8, "elements of batch['ids']"),
    ],
)
def test_counts_and_their_names(count: Count, number: float, words: str) -> None:
    assert counted(count, BATCH) == number
    assert str(count) == words
    assert count in candidates(BATCH) or count.kind == "elements" or count.mask == ("mask",)


def test_items_of_lists_are_counted_together() -> None:
    count = Count("elements", ("labels", EACH))
    assert count in candidates(BOXES)
    assert counted(count, BOXES) == 4 * 7
    assert str(count) == "elements of batch['labels'][i]"


def test_tensors_are_found_in_any_structure() -> None:
    nested = ({"a": torch.ones(2)}, [torch.zeros(2), torch.zeros(2)])
    assert [path for path, _ in paths(nested)] == [(0, "a"), (1, 0), (1, 1)]
    assert [path for path, _ in paths(torch.ones(2))] == [()]
    assert counted(Count("unequal", (1, 0), 0), nested) == 0
