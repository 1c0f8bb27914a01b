"""optimizer: groups, decay, hyperparameters and what is said where a library is missing."""

import pytest
import tiny
import torch
from contract import Effect

from autofit.core.hyperparameters import Hyperparameters
from autofit.techniques import refuse, settle, technique_named
from autofit.training.build import build
from autofit.training.loop import train_step

OPTIMIZER = technique_named("optimizer")


@pytest.mark.parametrize("value", OPTIMIZER.values)
def test_weight_decay_falls_on_matrices_only(value: str) -> None:
    hyperparameters = Hyperparameters(lr=0.02, weight_decay=0.3)
    setup = build(tiny.conv_workload(), {"optimizer": value}, tiny.CPU, hyperparameters=hyperparameters)
    groups = setup.optimizer.param_groups
    decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {(parameter.dim() >= 2, decay[parameter]) for _, parameter in setup.trainable()} == {
        (True, 0.3),
        (False, 0.0),
    }
    assert {group["lr"] for group in groups} == {0.02}


def test_weight_decay_pulls_weights_towards_zero() -> None:
    def after(weight_decay: float) -> torch.Tensor:
        hyperparameters = Hyperparameters(lr=1e-3, weight_decay=weight_decay)
        setup = build(tiny.mlp_workload(), {}, tiny.CPU, hyperparameters=hyperparameters)
        train_step(setup, setup.workload.batch(4))
        return setup.model.out.weight.detach()

    before = build(tiny.mlp_workload(), {}, tiny.CPU).model.out.weight.detach()
    torch.testing.assert_close(after(0.5), after(0.0) - 1e-3 * 0.5 * before)


def test_a_group_without_parameters_is_left_out() -> None:
    setup = build(tiny.mlp_workload(), {"lora_rank": 4}, tiny.CPU)
    assert [len(group["params"]) for group in setup.optimizer.param_groups] == [2 * 9]


def test_without_bitsandbytes_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    workload = tiny.mlp_workload()
    refused = refuse(settle({"optimizer": "adamw-8bit"}, workload, tiny.CPU), workload, tiny.CPU)
    assert refused.startswith("optimizer: adamw-8bit needs bitsandbytes")
    assert "pip install bitsandbytes" in refused
    assert refuse(settle({}, workload, tiny.CPU), workload, tiny.CPU) is None


def test_only_what_is_proven_is_ordered() -> None:
    assert OPTIMIZER.memory_order("sgd") < OPTIMIZER.memory_order("adamw")
    assert OPTIMIZER.memory_order("adamw-8bit") is None  # fp32 state of small tensors against bf16 state
    assert OPTIMIZER.memory_order("adamw-foreach") is None  # step counters on the host against ones on the device


def test_the_8_bit_state_of_small_tensors_is_larger_than_adamws_in_bf16() -> None:
    """Why adamw-8bit is not ordered below adamw."""

    def state_bytes(value: str) -> int:
        setup = build(tiny.llama_workload(), {"optimizer": value, "precision": "bf16"}, tiny.CPU)
        train_step(setup, setup.workload.batch(4))
        small = [parameter for _, parameter in setup.trainable() if parameter.numel() < 4096]
        states = (setup.optimizer.state[parameter] for parameter in small)
        return sum(each.nbytes for state in states for each in state.values() if isinstance(each, torch.Tensor))

    assert state_bytes("adamw-8bit") > state_bytes("adamw")


def shows(effect: Effect) -> None:
    from bitsandbytes.optim import AdamW8bit

    optimizer, ran = effect.setup.optimizer, effect.trace.ran
    kinds = {"adamw-foreach": torch.optim.AdamW, "adamw-8bit": AdamW8bit, "sgd": torch.optim.SGD}
    assert type(optimizer) is kinds[effect.value]
    assert effect.off_trace.ran("_fused_adamw_")
    assert not ran("_fused_adamw_")
    if effect.value == "adamw-foreach":
        assert ran("_foreach_addcdiv_")
    elif effect.value == "sgd":
        assert not optimizer.state
    else:
        sizes = {(p.numel() >= 4096, optimizer.state[p]["state1"].dtype) for _, p in effect.setup.trainable()}
        assert sizes == {(True, torch.uint8), (False, torch.float32)}
        assert {optimizer.state[p]["state2"].numel() - p.numel() for _, p in effect.setup.trainable()} == {0}
