"""Batches of the effective size in an order that the seed decides, masked as BERT was trained."""

import pytest
import torch

from autofit.data.batch import IGNORED_LABEL
from autofit.data.file_loader import FileLoader, masked
from autofit.data.samples import Ragged, Stacked


def loader_of(count: int, size: int) -> FileLoader:
    return FileLoader(Stacked({"rows": torch.arange(count)}), size)


def passes(loader: FileLoader) -> list[torch.Tensor]:
    return [batch["rows"] for batch in loader]


@pytest.mark.parametrize(("count", "size", "batches"), [(8, 4, 2), (9, 4, 3), (3, 4, 1), (1, 4, 1), (3, 8, 1)])
def test_every_batch_is_whole_and_every_sample_is_in_one(count: int, size: int, batches: int) -> None:
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


def hidden_words(mask_id: int | None = 4) -> FileLoader:
    return FileLoader(Stacked({"input_ids": torch.arange(10, 110).view(1, 100)}), 1, mask_id=mask_id)


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
    assert kept == pytest.approx(0.101, abs=0.01)  # one in a hundred of the replaced ones is the same by chance


def test_neither_padding_nor_the_frame_is_guessed_or_put_elsewhere() -> None:
    frame, padding, words = 1, 0, torch.arange(10, 30)
    ids = torch.cat([torch.tensor([frame]), words.repeat(50), torch.tensor([frame]), words[:5]])
    labels = ids.masked_fill(ids == frame, IGNORED_LABEL)
    samples = Ragged({"input_ids": ids, "labels": labels}, torch.tensor([[0, 1002], [1002, 1007]]), padding)
    torch.manual_seed(0)
    (batch,) = FileLoader(samples, 2, mask_id=4)
    own = batch["labels"] != IGNORED_LABEL
    assert 100 < own.sum() < 200
    assert not (own & (batch["attention_mask"] == 0)).any()
    assert batch["labels"][own].min() >= 10
    assert (batch["input_ids"] == frame).sum() == 2
    assert (batch["input_ids"][own] >= 4).all()
