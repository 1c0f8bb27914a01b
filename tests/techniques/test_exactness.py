"""Exact values on other shapes of model than the contract's two: the same loss and gradients as the plain loop.

Compiled blocks also show there that equal ones share their code.
"""

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autofit.core.config import Value
from autofit.core.errors import RefusedError
from autofit.core.workload import Workload
from autofit.setup import Setup
from autofit.setup.layers import repeated_blocks
from autofit.training.build import build
from autofit.training.step import accumulate, update
from tests import tiny
from tests.techniques.contract import (
    ALIKE,
    EFFECTIVE_BATCH,
    ON_ONE_DEVICE,
    knobs,
    living,
    reason_against,
    values_of,
)

WORKLOADS: dict[str, Workload] = {
    "gpt2": tiny.gpt2_workload(EFFECTIVE_BATCH),
    "bert": tiny.bert_workload(EFFECTIVE_BATCH),
    "vit": tiny.vit_workload(EFFECTIVE_BATCH),
    "convolutions": tiny.conv_workload(
        EFFECTIVE_BATCH, lambda: tiny.ConvNet(norm=lambda n: nn.GroupNorm(4, n))
    ),
    "mlp": tiny.mlp_workload(EFFECTIVE_BATCH),
}
# what enters the first block of an mlp needs no gradient
GRAPHS = dict.fromkeys(WORKLOADS, 1) | {"mlp": 2}
EXACT = [
    (technique.name, value)
    for technique in ON_ONE_DEVICE
    for value in values_of(technique)
    if value != technique.off
    and technique.exact(value, WORKLOADS["mlp"])
    and not reason_against(technique.name, value)
    if (technique.name, value) not in ALIKE
]


def step(
    workload: Workload, config: dict[str, Value]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    """The loss, the gradients that are left, and the weights after one step from the same weights."""
    setup = build(workload, config, tiny.CPU, model=living(workload))
    with contextlib.closing(setup):
        counters.clear()
        loss = accumulate(setup, workload.batch(EFFECTIVE_BATCH))
        gradients = {
            key: each.grad.clone() for key, each in setup.trainable() if each.grad is not None
        }
        update(setup)
        weights = {key: each.detach().clone() for key, each in setup.model.named_parameters()}
        if setup.config["compile"] != "none":
            equal_blocks_share_one_graph(setup)
        return loss, gradients, weights


def equal_blocks_share_one_graph(setup: Setup) -> None:
    """The first step has compiled it, and another one compiles nothing; nothing breaks."""
    assert len(repeated_blocks(setup.model)) >= 2
    model = next(name for name, workload in WORKLOADS.items() if workload is setup.workload)
    accumulate(setup, setup.workload.batch(EFFECTIVE_BATCH))
    assert counters["stats"]["unique_graphs"] == GRAPHS[model]
    assert not counters["graph_break"]


@functools.cache
def plain_step(model: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    return step(WORKLOADS[model], {})


@pytest.mark.parametrize("model", WORKLOADS)
@pytest.mark.parametrize(("name", "value"), EXACT)
def test_an_exact_value_is_the_same_mathematics(name: str, value: Value, model: str) -> None:
    workload = WORKLOADS[model]
    try:
        loss, gradients, weights = step(workload, knobs(name, value))
    except RefusedError as refused:
        pytest.skip(str(refused))
    plain_loss, plain_gradients, plain_weights = plain_step(model)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=1e-6)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[key], rtol=1e-3, atol=2e-6)
    for key, weight in weights.items():
        if key in plain_gradients:  # a BERT's pooler takes no part in filling masks
            # Adam keeps only the sign of what is nothing but rounding
            clear = plain_gradients[key].abs() > 1e-4
            torch.testing.assert_close(
                weight[clear], plain_weights[key][clear], rtol=1e-4, atol=1e-5
            )
