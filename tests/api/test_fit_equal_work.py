"""`fit` trains what was written, whatever the micro-batch: padded texts of unequal length with a loss of one's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autofit

LENGTHS = (24, 3, 4, 3)  # one sample in four is long


class Decoder(nn.Module):
    """A language model of one layer, as people write them; its head may begin with zeros."""

    def __init__(self, *, zero_head: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        if zero_head:
            nn.init.zeros_(self.head.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.layer(self.tokens(ids), src_mask=hidden))


def padded(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(8, 24, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row in range(8):
        length = LENGTHS[row % 4]
        text = torch.randint(1, 32, (length,), generator=generator)
        ids[row, :length] = text
        labels[row, : length - 1] = text[1:]
    return {"ids": ids, "labels": labels}


def of_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["ids"]).flatten(0, 1).float()
    return functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)


def trained(
    micro: int, *, loss: Callable[..., Any] = of_tokens, zero_head: bool = True, **options: Any
) -> Any:
    torch.manual_seed(0)
    precision = options.pop("precision", "fp32")
    return autofit.fit(
        Decoder(zero_head=zero_head),
        [padded(seed) for seed in range(4)],
        loss=loss,
        config={"micro_batch_size": micro, "optimizer": "adamw", "precision": precision},
        lr=3e-3,
        device="cpu",
        mem=1,
        **options,
    )


@pytest.mark.parametrize("zero_head", [True, False])
def test_micro_batches_have_the_losses_of_the_whole_batch(zero_head: bool) -> None:
    """With a head of zeros every sample's loss is log(32): their losses alone would not tell."""
    runs = {micro: trained(micro, zero_head=zero_head) for micro in (8, 2, 1)}
    whole = [step.loss for step in runs[8].history]
    for micro in (2, 1):
        assert [step.loss for step in runs[micro].history] == pytest.approx(whole, abs=1e-5)


def test_mixed_precision_takes_over_the_verdict() -> None:
    """bf16 rounds by 1/256: the norm of the gradient of micro-batches is within that of the whole batch's."""
    norms = [
        trained(micro, precision="bf16-mixed", max_grad_norm=1e9).history[0].gradient_norm
        for micro in (8, 2)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=4e-3)


def test_a_loss_that_does_not_split_is_refused_with_the_remedy() -> None:
    def coupled(model: nn.Module, batch: Any) -> torch.Tensor:
        return of_tokens(model, batch).sqrt()

    with pytest.raises(
        autofit.InputError, match=r"cannot be split.*count=.*Set micro_batch_size to 8"
    ):
        trained(2, loss=coupled)
    assert len(trained(8, loss=coupled).history) == 4


def test_a_loss_may_give_its_sum_and_its_count() -> None:
    def summed(model: nn.Module, batch: Any) -> Any:
        logits = model(batch["ids"]).flatten(0, 1)
        total = functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
        return total, int((batch["labels"] != -100).sum())

    whole = [step.loss for step in trained(8).history]
    for micro in (8, 1):
        losses = [step.loss for step in trained(micro, loss=summed).history]
        assert losses == pytest.approx(whole, abs=1e-5)


def test_a_count_may_be_given(caplog: pytest.LogCaptureFixture) -> None:
    def valid(batch: Any) -> int:
        return int((batch["labels"] != -100).sum())

    whole = [step.loss for step in trained(8).history]
    assert [step.loss for step in trained(1, count=valid).history] == pytest.approx(whole, abs=1e-5)
    with pytest.raises(autofit.InputError, match="it is not a mean over count="):
        trained(1, count=lambda batch: len(batch["ids"]))
    with pytest.raises(autofit.InputError, match="count must be a function of a batch"):
        trained(1, count=3)


def test_evaluation_is_the_mean_of_the_set_whatever_its_batches() -> None:
    """All tokens count alike, in batches of any size."""
    held_out = [padded(7), padded(8)]
    halves = [
        {name: tensor[start : start + 2] for name, tensor in held_out[0].items()}
        for start in (0, 2, 4, 6)
    ]
    whole = trained(8, zero_head=False, steps=1, eval_loader=held_out).evaluations
    cut = trained(2, zero_head=False, steps=1, eval_loader=[*halves, held_out[1]]).evaluations
    assert cut == pytest.approx(whole, abs=1e-5)


def test_what_the_loss_averages_over_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trained(2)
    assert "the loss is a mean over batch['labels'] != -100" in caplog.text
