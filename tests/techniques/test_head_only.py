"""head_only: the output layer alone is trained, and no gradient reaches what is below."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.config import Value
from autofit.core.errors import RefusedError
from autofit.core.result import tier
from autofit.core.workload import Workload
from autofit.setup import Setup
from autofit.techniques import canonicalize, fidelity, refuse, technique_named
from autofit.training.build import build
from tests import tiny
from tests.estimate.traced import peak, traced, tracked
from tests.techniques.contract import Effect

ALONE: dict[str, Value] = {"head_only": True}


def trained(setup: Setup) -> set[str]:
    return {name for name, _ in setup.trainable()}


def shows(effect: Effect) -> None:
    (name,) = trained(effect.setup)
    assert "head" in name
    assert len(trained(effect.off)) > 10
    assert not effect.trace.ran("layer_norm_backward")
    assert not effect.trace.ran("attention_backward")
    assert effect.trace.peak_bytes < effect.off_trace.peak_bytes


def test_of_a_classifier_all_layers_outside_its_base_model_are_trained() -> None:
    setup = build(tiny.vit_workload(), ALONE, tiny.CPU)
    assert trained(setup) == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"precision": "bf16-mixed", "micro_batch_size": 2},
        {"loss": "chunked"},
        {"quantization": "nf4"},
    ],
)
def test_a_trace_takes_what_a_step_takes(knobs: dict[str, Value]) -> None:
    workload = tiny.llama_workload()
    assert peak(traced(workload, **ALONE, **knobs)) == pytest.approx(
        tracked(workload, {**ALONE, **knobs}), rel=0.001
    )


def test_it_is_a_tier_below_all_others_and_never_searched_unasked() -> None:
    workload = tiny.llama_workload()
    head, lora = (canonicalize(knobs, workload, tiny.CPU) for knobs in (ALONE, {"lora_rank": 4}))
    assert (tier(head), tier(lora)) == ("head", "lora")
    assert fidelity(head) < fidelity(lora) < fidelity(canonicalize({}, workload, tiny.CPU))
    assert technique_named("head_only").choices(tiny.CPU) == (False,)


def test_what_saves_activations_of_blocks_means_nothing_beside_it() -> None:
    config = canonicalize(
        {**ALONE, "activation_checkpointing": "full"}, tiny.llama_workload(), tiny.CPU
    )
    assert config["activation_checkpointing"] == "none"


class Named(nn.Module):
    """A network of which no attribute is named as an output layer is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x)).mean()


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        (tiny.gpt2_workload(), "that of the input embedding, too; use lora_rank."),
        (Workload(model=Named, batch=lambda n: {"x": torch.ones(n, 4)}), "no output layer named"),
    ],
)
def test_what_has_no_head_of_its_own_is_refused(workload: Workload, told: str) -> None:
    with pytest.raises(RefusedError, match=told):
        build(workload, ALONE, tiny.CPU)


@pytest.mark.parametrize(
    ("knobs", "devices", "end"),
    [
        ({"lora_rank": 4}, 1, "head_only false."),
        ({"tensor_parallel": 2}, 2, "data_parallel alone."),
    ],
)
def test_what_would_train_something_else_is_refused(
    knobs: dict[str, Value], devices: int, end: str
) -> None:
    workload, hardware = tiny.llama_workload(), replace(tiny.CPU, devices=devices)
    assert str(
        refuse(canonicalize({**ALONE, **knobs}, workload, hardware), workload, hardware)
    ).endswith(end)
