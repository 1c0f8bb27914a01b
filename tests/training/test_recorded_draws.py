"""Random draws of a whole batch are given to its samples again."""

import pytest
import torch
from torch.nn import functional

from autofit.training.recorded_draws import RecordedDraws, UnprovableDrawError


def pass_of(x: torch.Tensor) -> torch.Tensor:
    noisy = x + torch.randn_like(x)
    dropped = functional.dropout(noisy, 0.5)
    return dropped * torch.empty(len(x), 1).uniform_() + torch.randint(0, 9, (len(x), 1))


def test_samples_get_the_draws_that_they_had_in_the_batch() -> None:
    x = torch.arange(12.0).view(4, 3)
    draws = RecordedDraws(4)
    with draws:
        whole = pass_of(x)
    for sample in range(4):
        draws.replay([sample])
        with draws:
            assert torch.equal(pass_of(x[sample : sample + 1]), whole[sample : sample + 1])
    draws.replay([2, 0, 3, 1])
    with draws:
        assert torch.equal(pass_of(x[[2, 0, 3, 1]]), whole[[2, 0, 3, 1]])


def test_draws_that_belong_to_no_sample_differ_from_pass_to_pass() -> None:
    draws = RecordedDraws(2)
    with draws:
        first = torch.rand(())
    seen = []
    for sample in range(2):
        draws.replay([sample])
        with draws:
            seen.append(float(torch.rand(())))
    assert min(seen) == 0.0
    assert max(seen) > 0.99
    assert 0 <= float(first) < 1


def test_more_draws_than_the_batch_had_prove_nothing() -> None:
    draws = RecordedDraws(2)
    with draws:
        torch.randn(2)
    draws.replay([0])
    with draws, pytest.raises(UnprovableDrawError, match="more random numbers"):
        torch.randn(1)
        torch.randn(1)


def test_rows_of_a_sample_may_be_several() -> None:
    draws = RecordedDraws(2)
    with draws:
        whole = torch.randn(3, 8)
    draws.replay([1])
    with draws:
        assert torch.equal(torch.randn(3, 4), whole[:, 4:])
