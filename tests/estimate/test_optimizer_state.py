from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from autofit.estimate.operator_costs import Cost
from autofit.estimate.optimizer_state import OptimizerCost, cost_of_update, scaled_shapes
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.roofline import Speed
from autofit.techniques import canonicalize
from tests.estimate.traced import AMPERE
from tests.tiny import CPU, llama_workload

SHAPES = {
    (torch.Size((64, 64)), torch.float32, True): 3,
    (torch.Size((128, 64)), torch.float32, False): 2,
}
ELEMENTS = 3 * 64 * 64 + 2 * 128 * 64


def _cost(optimizer: str, hardware: Any = CPU) -> Any:
    workload = llama_workload()
    return cost_of_update(
        workload, hardware, canonicalize({"optimizer": optimizer}, workload, hardware), SHAPES
    )


def test_adamw_keeps_two_moments_and_sgd_none() -> None:
    adamw = _cost("adamw")
    assert adamw.state == 8 * ELEMENTS + 5 * 4  # and a counter for each weight
    assert adamw.temporary == 0
    assert _cost("sgd").state == 0


@pytest.fixture(autouse=True)
def no_overrides() -> None:
    """bitsandbytes remembers, for the whole process, which weights an earlier test (or Trainer) wanted in 32 bits."""
    pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance().initialize()


def test_8bit_state_is_two_bytes_a_weight_and_its_scales() -> None:
    state = _cost("adamw-8bit").state
    assert 2 * ELEMENTS < state <= 2 * ELEMENTS * (1 + 4 / 256) + 5 * 4096


def test_foreach_needs_temporaries_for_all_weights_at_once() -> None:
    foreach = _cost("adamw-foreach")
    assert foreach.temporary >= 4 * ELEMENTS
    assert foreach.largest < foreach.temporary


def test_muon_keeps_one_moment_of_matrices_in_blocks_and_two_of_others() -> None:
    assert _cost("muon").state == 4 * 3 * 64 * 64 + 8 * 2 * 128 * 64 + 2 * 4


def test_on_cuda_state_is_counted_in_blocks() -> None:
    assert _cost("adamw", AMPERE).state == 8 * ELEMENTS + 5 * 512


def test_shapes_of_adapters_follow_the_rank() -> None:
    sizes = {(17, 64): 2, (64, 64): 1, (4 * 17, 64): 3}  # the last of four experts
    shapes = Counter(
        {(torch.Size(size), torch.float32, True): count for size, count in sizes.items()}
    )
    scaled = scaled_shapes(shapes, 17, 8)
    assert scaled[torch.Size((8, 64)), torch.float32, True] == 2
    assert scaled[torch.Size((4 * 8, 64)), torch.float32, True] == 3
    assert scaled[torch.Size((64, 64)), torch.float32, True] == 1


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "adafactor"])
def test_a_step_moves_at_least_the_weights_and_their_gradients(optimizer: str) -> None:
    assert _cost(optimizer).moved >= 8 * ELEMENTS


def test_each_weight_takes_what_a_call_takes_whatever_its_size() -> None:
    cost = Cost("memory", "float32", 0, (1000,), "aten::step")
    three = OptimizerCost(0, 0, 0, 0, 0, ((cost, 3),), launches=3)
    rates = replace(UNKNOWN, bandwidth=1e3, launch_seconds=0.1, operators={cost.call: (5.0, 2.0)})
    assert three.seconds(Speed(rates, asynchronous=False)) == pytest.approx(
        3 * (5.0 + 2.0 * 1.0) + 0.3
    )
