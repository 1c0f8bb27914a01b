"""micro_batch_size: divisors of the effective batch, and what cannot be cut."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from autofit.core.errors import RefusedError
from autofit.core.workload import Traits, Workload
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.step import accumulate
from tests import tiny
from tests.techniques.contract import EFFECTIVE_BATCH, Effect

MICRO_BATCH_SIZE = technique_named("micro_batch_size")
TRAITS = Traits(
    parameters=1, blocks=2, linears=3, attention=False, sdpa=True, batch_norm=False, dropout=False
)


def test_the_choices_are_the_divisors() -> None:
    assert MICRO_BATCH_SIZE.choices_for(tiny.mlp_workload(12), tiny.CPU) == (1, 2, 3, 4, 6, 12)
    assert MICRO_BATCH_SIZE.choices_for(tiny.mlp_workload(7), tiny.CPU) == (1, 7)
    two_ranks = replace(tiny.CPU, devices=2)  # which may see the same samples
    assert MICRO_BATCH_SIZE.choices_for(tiny.mlp_workload(12), two_ranks) == (1, 2, 3, 4, 6, 12)


def test_null_stands_for_the_whole_batch() -> None:
    assert (
        canonicalize({"micro_batch_size": None}, tiny.mlp_workload(12), tiny.CPU)[
            "micro_batch_size"
        ]
        == 12
    )


def test_a_loss_that_cannot_be_split_keeps_the_whole_batch() -> None:
    workload = replace(tiny.mlp_workload(12), traits=replace(TRAITS, splits=False))
    reason = "micro_batch_size: this loss cannot be split into slices; set micro_batch_size to the whole 12."
    assert (
        refuse(canonicalize({"micro_batch_size": 6}, workload, tiny.CPU), workload, tiny.CPU)
        == reason
    )
    assert refuse(canonicalize({}, workload, tiny.CPU), workload, tiny.CPU) is None


def test_it_is_exact_unless_slices_change_the_statistics_or_the_draws() -> None:
    workload = tiny.mlp_workload()
    assert MICRO_BATCH_SIZE.exact(1, workload)
    assert MICRO_BATCH_SIZE.exact(1, replace(workload, traits=TRAITS))
    assert not MICRO_BATCH_SIZE.exact(1, replace(workload, traits=replace(TRAITS, dropout=True)))
    assert not MICRO_BATCH_SIZE.exact(1, replace(workload, traits=replace(TRAITS, batch_norm=True)))


def test_batch_norm_over_slices_is_warned_of() -> None:
    (warning,) = build(tiny.conv_workload(4), {"micro_batch_size": 2}, tiny.CPU).warnings
    assert (
        warning
        == "BatchNorm takes its statistics over micro-batches of 2, not over the whole batch of 4."
    )
    assert not build(tiny.conv_workload(4), {}, tiny.CPU).warnings
    assert not build(tiny.mlp_workload(4), {"micro_batch_size": 2}, tiny.CPU).warnings


class Flat(nn.Module):
    """BatchNorm over features without a place: one sample is one value per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x)).square().mean()


def test_one_value_per_channel_is_refused_with_the_remedy() -> None:
    workload = Workload(
        model=Flat, batch=lambda n: {"x": torch.randn(n, 8)}, effective_batch_size=4
    )
    setup = build(workload, {"micro_batch_size": 1}, tiny.CPU)
    with pytest.raises(
        RefusedError, match=r"BatchNorm .* of shape \(1, 8\): use micro-batches of 2 or more"
    ):
        accumulate(setup, workload.batch(4))
    assert math.isfinite(evaluate(setup, [workload.batch(4)]))  # by the stored statistics
    setup.close()
    assert not setup.model.norm._forward_pre_hooks
    assert accumulate(
        build(workload, {"micro_batch_size": 2}, tiny.CPU), workload.batch(4)
    ).isfinite()
    assert accumulate(
        build(tiny.conv_workload(4), {"micro_batch_size": 1}, tiny.CPU),
        tiny.conv_workload(4).batch(4),
    )


NUMBERS = (1, 2, 4)


def shows(effect: Effect) -> None:
    assert effect.trace.samples == [effect.value] * (EFFECTIVE_BATCH // effect.value)
    assert effect.off_trace.samples == [EFFECTIVE_BATCH]
