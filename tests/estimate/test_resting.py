"""What is held between steps: what one can work out from the model's own parameters."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.estimate import Resting
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.resting import resting_of
from autofit.estimate.timeline import timeline
from autofit.estimate.trace import trace
from autofit.report.formatting import resting_words
from autofit.training.inspect import inspect_workload
from tests import tiny

PLAIN = tiny.llama_workload(4)
WORKLOAD = replace(PLAIN, traits=inspect_workload(PLAIN, tiny.CPU, budget_bytes=None))
PARAMETERS = sum(parameter.numel() for parameter in tiny.living(PLAIN).parameters())
BUFFERS = sum(buffer.nbytes for buffer in tiny.living(PLAIN).buffers())


def resting(**knobs: Any) -> Resting:
    return resting_of(trace(WORKLOAD, knobs, tiny.CPU), WORKLOAD, tiny.CPU)


def test_full_training_holds_sixteen_bytes_a_parameter() -> None:
    found = resting(precision="fp32", micro_batch_size=2)
    assert (found.trained, found.parameters) == (PARAMETERS, PARAMETERS)
    assert (found.weights, found.adapters) == (4 * PARAMETERS + BUFFERS, 0)
    assert found.gradients == 4 * PARAMETERS
    # and a counter of steps for each tensor
    assert found.optimizer == pytest.approx(8 * PARAMETERS, rel=0.01)
    assert found.blocks == 2


def test_adapters_are_told_apart_from_what_is_frozen() -> None:
    found = resting(precision="bf16", lora_rank=4, lora_targets="all-linear", micro_batch_size=2)
    assert found.weights == pytest.approx(2 * PARAMETERS + BUFFERS, rel=0.001)
    assert found.adapters == found.gradients == 2 * found.trained
    assert found.parameters == PARAMETERS + found.trained
    assert 0 < found.trained < PARAMETERS / 4


def test_what_is_given_up_or_computed_again_is_not_held() -> None:
    plain, spared = resting(), resting(optimizer_in_backward=True, activation_checkpointing="full")
    assert spared.gradients == 0
    assert plain.activations and spared.activations
    assert 0 < spared.activations < plain.activations / 3


def test_it_is_told_in_words_and_beside_the_timeline() -> None:
    line = timeline(WORKLOAD, tiny.CPU, UNKNOWN, trace(WORKLOAD, {"lora_rank": 4}, tiny.CPU).config)
    assert line and line.resting
    words = resting_words(line.resting)
    assert f"Trained: {line.resting.trained:,} of {line.resting.parameters:,} parameters (" in words
    assert "2 blocks of a micro-batch keep" in words
    assert line.bottleneck in ("compute", "memory", "transfer")
