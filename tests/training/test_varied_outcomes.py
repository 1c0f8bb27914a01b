"""Limits, bends and tables become such that gradients show what depends on them, alike in every pass."""

import pytest
import torch
from torch import nn

from autofit.training.varied_outcomes import VariedOutcomes

X = torch.tensor([1.0, 2.0, 3.0, 4.0])


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def test_half_of_the_first_pass_is_above_a_limit_and_others_keep_it() -> None:
    one = weight()
    varied = VariedOutcomes(scalars=False)
    varied.begin({})
    with varied:
        assert (X * one > 100).tolist() == [False, False, True, True]
        assert (X * one <= 100).tolist() == [True, True, False, False]
    varied.begin({})
    with varied:
        assert (X[2:] * one > 100).tolist() == [True, True]
        assert (X[:1] * one <= 100).tolist() == [True]


def test_what_weights_and_data_have_no_part_in_is_compared_as_it_is() -> None:
    varied = VariedOutcomes(scalars=True)
    varied.begin({"labels": torch.arange(4)})
    with varied:
        assert not (X > 100).any()
        assert (torch.arange(4) != -100).all()


def test_numbers_of_a_batch_are_larger_and_smaller_by_turns_but_a_loop_ends() -> None:
    varied = VariedOutcomes(scalars=True)
    found = []
    for _ in range(3):
        varied.begin({})
        with varied:
            found.append(bool((X * weight()).mean() > 0))
            rounds = 0
            while (X * weight(0.0)).mean() > 0:
                rounds += 1
            assert rounds <= 2
    assert found == [True, False, True]


@pytest.mark.parametrize(
    "bent",
    [
        lambda x: x.abs(),
        lambda x: x.clamp(min=-9),
        lambda x: x.clamp(-9, 9),
        lambda x: torch.clip(x, max=9),
        lambda x: torch.maximum(x, torch.tensor(-9.0)),
        lambda x: torch.min(x, torch.tensor(9.0)),
        lambda x: nn.functional.l1_loss(x, torch.tensor(-1.0)),
    ],
)
def test_the_slope_of_a_bend_changes_everywhere(bent) -> None:
    def slope(value: float) -> float:
        x = weight(value)
        varied = VariedOutcomes(scalars=False)
        varied.begin({})
        with varied:
            (gradient,) = torch.autograd.grad(bent(x), x)
        return float(gradient)

    assert abs(slope(1.0) - slope(2.0)) > 1e-6
    x = weight(1.0)
    assert torch.autograd.grad(bent(x), x)[0] == 1


def test_classes_get_weights_of_their_own() -> None:
    table = torch.tensor([1.0, 1.0, 3.0])
    varied = VariedOutcomes(scalars=False)
    labels = torch.tensor([0, 1, 2])
    varied.begin({"labels": labels, "of_samples": X})
    with varied:
        assert table[labels].tolist() == [1, 2, 3]
        assert X[torch.tensor([0, 0])].tolist() == [1, 1]  # of the data
        outputs = torch.zeros(2, 3) * weight()
        loss = nn.functional.cross_entropy(
            outputs, torch.tensor([0, 1]), weight=table, reduction="none"
        )
    assert float((loss[1] / loss[0]).detach()) == pytest.approx(2)
