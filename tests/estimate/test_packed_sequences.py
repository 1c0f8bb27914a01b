"""Recurrent layers over sequences of known lengths take in a prediction what they take in a real step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autofit.core.workload import Workload
from tests.estimate.traced import AMPERE, peak, traced, tracked


class Tagger(nn.Module):
    """Marks every step of sequences that are packed by their lengths."""

    def __init__(self, layer: Callable[..., nn.Module], batch_first: bool, sort: bool) -> None:
        super().__init__()
        two = {} if sort else {"num_layers": 2, "bidirectional": True, "dropout": 0.1}
        self.rnn, self.head = layer(8, 16, batch_first=batch_first, **two), nn.Linear(16, 4)
        self.options: dict[str, Any] = {"batch_first": batch_first}
        self.sort = sort

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x if self.options["batch_first"] else x.transpose(0, 1)
        packed = pack_padded_sequence(
            x * 2, lengths.cpu(), enforce_sorted=not self.sort, **self.options
        )
        states, _ = self.rnn(packed)
        padded, known = pad_packed_sequence(states, total_length=7, **self.options)
        assert self.sort or known.tolist() == lengths.tolist()
        out: torch.Tensor = self.head(padded[..., :16]).square().mean()
        return out


@pytest.mark.parametrize(("batch_first", "sort"), [(True, True), (False, False)])
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_packed_sequences_are_predicted(
    layer: Callable[..., nn.Module], batch_first: bool, sort: bool
) -> None:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([6, 6, 3, 1, 5, 2][:samples])
        return {
            "x": torch.ones(samples, 6, 8),
            "lengths": lengths if sort else lengths.sort(descending=True)[0],
        }

    workload = Workload(lambda: Tagger(layer, batch_first, sort), batch, effective_batch_size=6)
    assert peak(traced(workload)) == pytest.approx(tracked(workload, {}), rel=0.005)
    assert peak(traced(workload, AMPERE)) > 0
