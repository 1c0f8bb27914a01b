"""Samples become batches: stacked, padded or normalised; in an order that the seed decides; masked as BERT was."""

from typing import Any

import pyarrow
import pytest
import torch

from autofit.data.batch import IGNORED_LABEL
from autofit.data.samples import FileLoader, Packed, Pictures, Ragged, Stacked, masked

NO = -100
IDS = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32)
SPANS = torch.tensor([[0, 3], [3, 4], [4, 6], [6, 6]])


def test_stacked_samples() -> None:
    samples = Stacked(
        {
            "input_ids": torch.tensor([[1, 2], [3, 4], [5, 9]]),
            "labels": torch.tensor([[NO, 1], [1, NO], [NO, NO]]),
        }
    )
    assert len(samples) == 3
    assert samples.batch(torch.tensor([2, 0]))["input_ids"].tolist() == [[5, 9], [1, 2]]
    assert samples.largest_id() == 9


def test_packed_samples() -> None:
    tokens = {"input_ids": torch.arange(7), "labels": torch.tensor([NO, 1, 2, NO, NO, NO, 6])}
    samples = Packed.of(tokens, 2, None)
    assert len(samples) == 3
    assert samples.batch(torch.tensor([2, 0]))["input_ids"].tolist() == [[4, 5], [0, 1]]
    assert samples.largest_id() == 6
    assert samples.has_labels(shifted=False).tolist() == [True, True, False]
    assert samples.has_labels(shifted=True).tolist() == [True, False, False]
    kept = samples.only(torch.tensor([False, True, True]))
    assert kept.batch(torch.tensor([0]))["input_ids"].tolist() == [[2, 3]]


def test_packed_texts_that_are_apart_have_positions_of_their_own() -> None:
    samples = Packed.of({"input_ids": torch.arange(8)}, 4, torch.tensor([0, 3, 5]))
    batch = samples.batch(torch.arange(2))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert batch["labels"].tolist() == [[NO, 1, 2, NO], [NO, NO, 6, 7]]
    little = Packed.of({"input_ids": torch.arange(3)}, 8, torch.tensor([0, 1]))
    (ids,) = little.batch(torch.arange(1))["input_ids"].tolist()
    assert ids == [0, 1, 2, 0, 1, 2, 0, 1]
    (positions,) = little.batch(torch.arange(1))["position_ids"].tolist()
    assert positions == [0, 0, 1, 0, 0, 1, 0, 0]


def test_a_batch_is_padded_to_its_longest() -> None:
    samples = Ragged({"input_ids": IDS, "labels": IDS}, SPANS, pad_id=9)
    batch = samples.batch(torch.tensor([2, 0]))
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[5, 6, 9], [1, 2, 3]]
    assert batch["labels"].tolist() == [[5, 6, NO], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert samples.batch(torch.tensor([1]))["input_ids"].tolist() == [[4]]
    assert samples.largest_id() == 9, "padding counts"


def test_labels_of_whole_samples_are_not_padded() -> None:
    samples = Ragged({"input_ids": IDS}, SPANS, 0, {"labels": torch.tensor([7, 8, 9, 10])})
    assert samples.batch(torch.tensor([2, 0]))["labels"].tolist() == [9, 7]
    kept = samples.only(torch.tensor([False, False, True, False]))
    assert kept.batch(torch.tensor([0]))["labels"].tolist() == [9]


def test_pictures_are_normalised_by_channel() -> None:
    pixels = pyarrow.chunked_array([[bytes([0, 255, 51, 102])], [bytes([255, 0, 0, 0])]])
    mean, deviation = torch.tensor([0.0, 0.2]), torch.tensor([1.0, 0.5])
    samples = Pictures(pixels, torch.tensor([4, 5]), (2, 1, 2), mean, deviation)
    batch = samples.batch(torch.tensor([0]))
    assert batch["labels"].tolist() == [4]
    assert torch.allclose(
        batch["pixel_values"], torch.tensor([[[[0.0, 1.0]], [[0.0, 0.4]]]]), atol=1e-6
    )
    assert len(samples.batch(torch.tensor([1, 0]))["pixel_values"]) == len(samples) == 2


# The loader


def loader_of(count: int, size: int) -> FileLoader:
    return FileLoader(Stacked({"rows": torch.arange(count)}), size)


def passes(loader: FileLoader) -> list[torch.Tensor]:
    return [batch["rows"] for batch in loader]


@pytest.mark.parametrize(
    ("count", "size", "batches"), [(8, 4, 2), (9, 4, 3), (3, 4, 1), (1, 4, 1), (3, 8, 1)]
)
def test_every_batch_is_whole_and_every_sample_is_in_one(
    count: int, size: int, batches: int
) -> None:
    loader = loader_of(count, size)
    seen = passes(loader)
    assert len(loader) == len(seen) == batches
    assert [len(batch) for batch in seen] == [size] * batches
    assert set(torch.cat(seen).tolist()) == set(range(count))
    assert torch.equal(torch.cat(seen)[:count].sort().values, torch.arange(count))


def test_the_order_is_that_which_the_emitted_script_makes() -> None:
    torch.manual_seed(7)
    seen = torch.cat(passes(loader_of(10, 4)))
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    order = torch.randperm(10, generator=generator)
    assert torch.equal(seen, torch.cat([order, order[:2]]))


def test_every_pass_has_an_order_of_its_own_which_the_seed_decides() -> None:
    loader = loader_of(100, 100)
    torch.manual_seed(3)
    (first,), (second,) = passes(loader), passes(loader)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    (again,) = passes(loader)
    assert torch.equal(first, again)


def test_in_order_every_sample_comes_once_and_nothing_is_drawn() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seen = [batch["rows"].tolist() for batch in loader_of(5, 2).in_order()]
    assert seen == [[0, 1], [2, 3], [4]]
    assert torch.equal(torch.get_rng_state(), before)


class Counted:
    """Numbers the batches that are made."""

    made = 0

    def __len__(self) -> int:
        return 10

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        self.made += 1
        return {"input_ids": chosen.view(-1, 1)}

    def largest_id(self) -> int:
        return 9


@pytest.mark.parametrize("options", [{}, {"ahead": True}, {"mask_id": 4}])
def test_a_pass_goes_on_where_it_stopped(options: Any) -> None:
    torch.manual_seed(3)
    loader = FileLoader(Counted(), 2, **options)
    begun = iter(loader)
    for _ in range(3):
        next(begun)
    state, rest = loader.state_dict(), [batch["input_ids"].tolist() for batch in begun]
    samples = Counted()
    other = FileLoader(samples, 2, **options)
    other.load_state_dict(state)
    before = torch.get_rng_state()
    assert [batch["input_ids"].tolist() for batch in other] == rest
    assert torch.equal(torch.get_rng_state(), before)
    assert samples.made == (5 if "mask_id" in options else 2)
    assert len(list(other)) == 5  # the next pass is a whole one


@pytest.mark.parametrize("mask_id", [None, 4])
@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 4), (4, [2, 4]), (5, [4])])
def test_a_pass_goes_on_at_the_same_sample_with_another_batch_size(
    size: int, sizes: list[int], mask_id: int | None
) -> None:
    torch.manual_seed(3)
    loader = FileLoader(Counted(), 2)
    order = [int(index) for batch in loader for index in batch["input_ids"]]
    seed = loader.state_dict()["seed"]
    other = FileLoader(Counted(), size, mask_id=mask_id)
    other.load_state_dict({"seed": seed, "samples": 6})
    rest = list(other)
    assert [len(batch["input_ids"]) for batch in rest] == sizes
    if mask_id is None:
        seen = [int(index) for batch in rest for index in batch["input_ids"]]
        assert seen[:4] == order[6:]
        assert set(seen[4:]) <= set(order[:2])  # the front fills up the last batch
    assert len(list(other)) == len(other)


def test_a_place_before_the_first_pass_is_none() -> None:
    loader = FileLoader(Counted(), 2)
    loader.load_state_dict(loader.state_dict())
    orders = {
        tuple(int(index) for batch in loader for index in batch["input_ids"]) for _ in range(3)
    }
    assert len(orders) == 3


def test_batches_that_are_made_ahead_are_the_same() -> None:
    torch.manual_seed(3)
    plain = [batch["input_ids"].tolist() for batch in FileLoader(Counted(), 2)]
    torch.manual_seed(3)
    assert [batch["input_ids"].tolist() for batch in FileLoader(Counted(), 2, ahead=True)] == plain


def hidden_words(mask_id: int | None = 4) -> FileLoader:
    return FileLoader(
        Stacked({"input_ids": torch.arange(10, 110).view(1, 100)}), 1, mask_id=mask_id
    )


def test_masks_change_from_pass_to_pass_but_not_in_evaluation() -> None:
    loader = hidden_words()
    (first,), (second,) = loader, loader
    assert not torch.equal(first["labels"], second["labels"])
    (first,), (second,) = loader.in_order(), loader.in_order()
    assert torch.equal(first["input_ids"], second["input_ids"])


def test_masks_are_drawn_from_the_generator_of_the_order() -> None:
    torch.manual_seed(7)
    (seen,) = hidden_words()
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    torch.randperm(1, generator=generator)
    chosen = torch.rand((1, 100), generator=generator) < 0.15
    assert torch.equal(seen["labels"] != IGNORED_LABEL, chosen)


def test_masking_is_as_bert_was_trained() -> None:
    ids = torch.arange(10, 110).repeat(400, 10)
    batch = masked({"input_ids": ids}, 4, torch.Generator().manual_seed(0))
    chosen = batch["labels"] != IGNORED_LABEL
    shown = batch["input_ids"]
    assert torch.equal(batch["labels"][chosen], ids[chosen])
    assert torch.equal(shown[~chosen], ids[~chosen])
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.005)
    hidden, kept = (shown == 4)[chosen].float().mean(), (shown == ids)[chosen].float().mean()
    assert hidden == pytest.approx(0.8, abs=0.01)
    # one in a hundred of the replaced ones is the same by chance
    assert kept == pytest.approx(0.101, abs=0.01)


def test_neither_padding_nor_the_frame_is_guessed_or_put_elsewhere() -> None:
    frame, padding, words = 1, 0, torch.arange(10, 30)
    ids = torch.cat([torch.tensor([frame]), words.repeat(50), torch.tensor([frame]), words[:5]])
    labels = ids.masked_fill(ids == frame, IGNORED_LABEL)
    samples = Ragged(
        {"input_ids": ids, "labels": labels}, torch.tensor([[0, 1002], [1002, 1007]]), padding
    )
    torch.manual_seed(0)
    (batch,) = FileLoader(samples, 2, mask_id=4)
    own = batch["labels"] != IGNORED_LABEL
    assert 100 < own.sum() < 200
    assert not (own & (batch["attention_mask"] == 0)).any()
    assert batch["labels"][own].min() >= 10
    assert (batch["input_ids"] == frame).sum() == 2
    assert (batch["input_ids"][own] >= 4).all()
