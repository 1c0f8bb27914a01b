"""Muon for matrices of blocks, AdamW for all else: as torch's two optimizers step them, by trace, state and refusal."""

from dataclasses import replace

import pytest
import torch

from autofit.core.config import Value
from autofit.core.workload import Hyperparameters, Traits
from autofit.setup.muon import matrices_of_blocks
from autofit.techniques import canonicalize, refuse
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny
from tests.estimate.traced import AMPERE, peak, traced, tracked

MUON: dict[str, Value] = {"optimizer": "muon"}
WORKLOAD = tiny.llama_workload()
LR = Hyperparameters(lr=1e-2, weight_decay=0.1)


def test_weights_move_as_torchs_own_optimizers_move_them() -> None:
    torch.manual_seed(0)
    model = WORKLOAD.model()
    setup = build(WORKLOAD, MUON, tiny.CPU, model=model, hyperparameters=LR)
    matrices = matrices_of_blocks(model)
    assert len(matrices) == 2 * 7  # of attention and MLP in each block, not embedding or head
    twins = {each: each.detach().clone().requires_grad_() for each in model.parameters()}
    vectors = [twin for each, twin in twins.items() if each.dim() == 1]
    ends = [twin for each, twin in twins.items() if each.dim() == 2 and each not in matrices]
    own = [
        torch.optim.Muon(
            [twins[each] for each in matrices],
            lr=1e-2,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": ends}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
        ),
    ]
    for _ in range(2):
        train_step_keeping(setup, twins)
        for optimizer in own:
            optimizer.step()
    for each, twin in twins.items():
        torch.testing.assert_close(each.detach(), twin.detach(), rtol=1e-4, atol=1e-6)


def train_step_keeping(setup: object, twins: dict[torch.nn.Parameter, torch.Tensor]) -> None:
    """A step whose gradients the twins get."""
    hooks = [
        each.register_post_accumulate_grad_hook(
            lambda one: setattr(twins[one], "grad", one.grad.clone())
        )
        for each in twins
    ]
    train_step(setup, WORKLOAD.batch(4))  # type: ignore[arg-type]
    for hook in hooks:
        hook.remove()


def test_a_loaded_state_goes_on() -> None:
    losses = []
    for stops in (False, True):
        torch.manual_seed(0)
        setup = build(WORKLOAD, MUON, tiny.CPU, model=WORKLOAD.model(), hyperparameters=LR)
        train_step(setup, WORKLOAD.batch(4))
        if stops:
            state, model = setup.optimizer.state_dict(), setup.model
            setup = build(WORKLOAD, MUON, tiny.CPU, model=model, hyperparameters=LR)
            setup.optimizer.load_state_dict(state)
        losses.append([float(train_step(setup, WORKLOAD.batch(4))) for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "knobs", [{}, {"optimizer_in_backward": True}, {"precision": "bf16", "micro_batch_size": 2}]
)
def test_a_trace_takes_what_a_step_takes(knobs: dict[str, Value]) -> None:
    assert peak(traced(WORKLOAD, **MUON, **knobs)) == pytest.approx(
        tracked(WORKLOAD, {**MUON, **knobs}), rel=0.001
    )


@pytest.mark.parametrize(
    ("knobs", "traits", "end"),
    [
        ({"lora_rank": 4}, None, "which are frozen here; use adamw."),
        ({"head_only": True}, None, "which are frozen here; use adamw."),
        ({"data_parallel": "fsdp"}, None, "use ddp, or adamw."),
        (
            {},
            Traits(1, 0, 2, attention=False, sdpa=False, batch_norm=False, dropout=False),
            "would step; use adamw.",
        ),
    ],
)
def test_where_there_is_no_whole_matrix_it_is_refused(
    knobs: dict[str, Value], traits: Traits | None, end: str
) -> None:
    workload, hardware = (
        replace(WORKLOAD, traits=traits),
        replace(AMPERE, devices=2 if "data_parallel" in knobs else 1),
    )
    assert str(
        refuse(canonicalize({**MUON, **knobs}, workload, hardware), workload, hardware)
    ).endswith(end)
