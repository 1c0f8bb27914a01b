"""What a rank of a context group gets of a batch; what is learned of it is in
training/test_tensor_and_context_ranks.py."""

from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.setup.split_tokens import _Split

IDS = torch.arange(1, 15).view(2, 7)
LABELS = IDS.masked_fill(IDS == 10, -100)


class Group:
    """Stands in for a process group of three."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 3


def cut(rank: int, **batch: Any) -> dict[str, Any]:
    group: Any = Group(rank)
    inputs, own = _Split(group, 2, None).cut(nn.Identity(), (), batch)
    assert inputs == ()
    return own


def test_parts_join_to_the_batch_and_labels_are_shifted_before_the_cut() -> None:
    parts = [cut(rank, input_ids=IDS, labels=LABELS, use_cache=False) for rank in range(3)]
    joined = {
        name: torch.cat([part[name] for part in parts], -1)
        for name in ("input_ids", "shift_labels")
    }
    assert joined["input_ids"][:, :7].equal(IDS)
    assert joined["shift_labels"][:, :6].equal(LABELS[:, 1:])
    assert joined["shift_labels"][:, 6:].eq(-100).all(), (
        "nothing follows the last token, and what fills up counts nothing"
    )
    assert [part["position_ids"].tolist() for part in parts] == [
        [[0, 1, 2]],
        [[3, 4, 5]],
        [[6, 7, 8]],
    ]
    assert {int(part["num_items_in_batch"]) for part in parts} == {11}
    assert all(part["labels"].eq(-100).all() for part in parts)
    assert not any(part["use_cache"] for part in parts)


def test_samples_padded_at_the_end_need_no_mask() -> None:
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    own = cut(1, input_ids=IDS, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask)
    assert "attention_mask" not in own
    assert own["shift_labels"].tolist() == [[5, 6, 7], [-100] * 3]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]] * 2)}, "padded at the end"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * 2)},
            "with labels of -100 there",
        ),
        (
            {"position_ids": torch.arange(7).expand(2, 7)},
            "and was given input_ids, labels, position_ids",
        ),
        ({"attention_mask": torch.ones(2, 1, 7, 7)}, "cuts batches of"),
        ({"labels": None}, "and was given input_ids"),
    ],
)
def test_what_cannot_be_cut_is_told(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cut(0, **{"input_ids": IDS, "labels": LABELS, **batch})
