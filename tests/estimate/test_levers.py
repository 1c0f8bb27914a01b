"""Knobs that libraries do their own way: what a trace shows of them is what the library has and does."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.config import Config
from autofit.core.workload import Hyperparameters
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup
from autofit.setup.host_copies import plain_tensors
from autofit.setup.torchao_optimizers import torchao_adamw
from autofit.techniques import technique_named
from autofit.techniques.precision import Precision
from tests.estimate.traced import AMPERE, HOPPER, peak, traced, tracked
from tests.tiny import CPU, llama_workload

# in whole blocks of 128 and 256, and not
SHAPES = [(64, 128), (4096,), (63, 65), (64, 65), (8, 16), (65536,)]


def _nbytes(tensors: list[torch.Tensor]) -> list[int]:
    return [
        plain.untyped_storage().nbytes() for tensor in tensors for plain in plain_tensors(tensor)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", ["adamw-4bit", "adamw-fp8", "adamw-sr", "adamw-8bit-sr"])
def test_low_bit_state_is_laid_out_as_torchao_lays_it_out(
    value: str, shape: tuple[int, ...], dtype: Any
) -> None:
    pytest.importorskip("torchao")
    weights = nn.ParameterList([torch.zeros(shape, dtype=dtype)])
    setup = Setup(
        llama_workload(), Config({}), CPU, torch.device("cpu"), weights, Hyperparameters()
    )
    technique_named("optimizer").trace(setup, value)
    assert setup.optimizer is not None
    weights[0].grad = torch.zeros_like(weights[0])
    setup.optimizer.step()
    ours = setup.optimizer.state[weights[0]]
    real: Any = torchao_adamw(value)([weights[0]], lr=1e-3)
    with StorageTracker():  # beside which it is not compiled
        real.step()
    theirs = real.state[weights[0]]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        parts = [ours[name]] if name == "step" else ours[name]
        assert [size for size in _nbytes(parts) if size] == _nbytes([tensor]), name


def test_what_torchao_keeps_on_the_host_takes_nothing_of_a_card() -> None:
    weights = nn.ParameterList([torch.zeros(64, 128)])
    setup = Setup(
        llama_workload(), Config({}), HOPPER, torch.device("cpu"), weights, Hyperparameters()
    )
    technique_named("optimizer").trace(setup, "adamw-4bit")
    assert setup.optimizer is not None
    weights[0].grad = torch.zeros_like(weights[0])
    setup.optimizer.step()
    assert setup.optimizer.state[weights[0]].keys() == {"exp_avg", "exp_avg_sq"}


def test_sgd_steps_all_weights_at_once_where_cuda_would() -> None:
    """Weight decay then needs a changed copy of every gradient together, not of one after the other."""
    weights = nn.ParameterList([torch.zeros(64, 64), torch.zeros(64, 64)])
    groups = {}
    for hardware in (CPU, AMPERE):
        setup = Setup(
            llama_workload(), Config({}), hardware, torch.device("cpu"), weights, Hyperparameters()
        )
        technique_named("optimizer").trace(setup, "sgd")
        assert setup.optimizer is not None
        groups[hardware.device] = setup.optimizer.param_groups[0]["foreach"]
    assert groups == {"cpu": None, "cuda": True}


def test_products_in_fp8_are_seen_as_such() -> None:
    pytest.importorskip("torchao")
    trace = traced(llama_workload(), HOPPER, precision="fp8")
    flops: Counter[tuple[str, str]] = Counter()
    for phase in ("forward", "backward"):
        for cost in trace.costs_of(phase):
            flops[phase, cost.dtype] += cost.flops if cost.kind == "matmul" else 0
    tokens, elements = 4 * 16, 2 * (4 * 32 * 32 + 3 * 32 * 128)  # the head stays in bf16
    assert flops["forward", "float8_e4m3fn"] == 2 * tokens * elements
    assert flops["forward", "bfloat16"] == 2 * tokens * 32 * 64
    assert flops["backward", "float8_e5m2"] == 4 * tokens * elements


def test_a_traced_step_in_fp8_takes_what_a_real_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's layers run on a CPU too, where the config is refused because it has no units for it."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(Precision, "refuse", lambda *_: None)
    knobs = {"precision": "fp8", "optimizer": "sgd"}
    workload = llama_workload()
    assert peak(traced(workload, **knobs)) == pytest.approx(tracked(workload, knobs), rel=0.001)
