"""lora_dora: the lengths of rows, which begin as those of the weights and are trained."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autofit.core.config import Value
from autofit.core.workload import Hyperparameters
from autofit.techniques import canonicalize, refuse
from autofit.training.build import build
from autofit.training.save_model import merged
from autofit.training.step import train_step
from tests import tiny
from tests.estimate.traced import peak, traced, tracked
from tests.techniques.contract import Effect

LORA = {"lora_rank": 4, "lora_dora": True}


def beside(value: Value) -> dict[str, Value]:
    return {"lora_rank": 4}


def lengths(model: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_parameters() if "magnitude" in name}


def shows(effect: Effect) -> None:
    found = lengths(effect.setup.model)
    adapters = [module for module in effect.setup.model.modules() if hasattr(module, "lora_A")]
    assert len(found) == len(adapters) > 0
    assert all(each.requires_grad for each in found.values())
    assert not lengths(effect.off.model)
    assert effect.trace.ran("linalg_vector_norm")
    assert not effect.off_trace.ran("linalg_vector_norm")


def test_it_begins_with_the_lengths_of_rows_of_weights_that_are_made_later() -> None:
    setup = build(tiny.llama_workload(), LORA, tiny.CPU)
    for module in setup.model.modules():
        if hasattr(module, "lora_B"):
            low = (
                module.lora_B["default"].weight
                @ module.lora_A["default"].weight
                * module.scaling["default"]
            )
            (own,) = module.lora_magnitude_vector.values()
            wanted = (module.get_base_layer().weight + low).norm(dim=1)
            torch.testing.assert_close(own.weight.detach(), wanted.detach())


def test_it_trains_and_is_merged() -> None:
    workload = tiny.llama_workload()
    setup = build(workload, LORA, tiny.CPU, hyperparameters=Hyperparameters(lr=1e-2))
    before = {name: each.detach().clone() for name, each in lengths(setup.model).items()}
    batch = workload.batch(4)
    for _ in range(2):
        train_step(setup, batch)
    assert all(not torch.equal(each, before[name]) for name, each in lengths(setup.model).items())
    setup.model.eval()
    with torch.no_grad():
        expected = setup.model(**batch).logits
        torch.testing.assert_close(
            merged(setup.model)(**batch).logits, expected, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "knobs", [{}, {"activation_checkpointing": "full", "precision": "bf16-mixed"}]
)
def test_a_trace_takes_what_a_step_takes(knobs: dict[str, Value]) -> None:
    workload = tiny.llama_workload()
    assert peak(traced(workload, **LORA, **knobs)) == pytest.approx(
        tracked(workload, {**LORA, **knobs}), rel=0.001
    )


def test_it_means_nothing_without_a_rank_and_needs_whole_weights() -> None:
    workload = tiny.llama_workload()
    assert canonicalize({"lora_dora": True}, workload, tiny.CPU)["lora_dora"] is False
    several = replace(tiny.CPU, devices=2)
    reasons = {
        kind: refuse(
            canonicalize({**LORA, "data_parallel": kind}, workload, several), workload, several
        )
        for kind in ("ddp", "fsdp")
    }
    assert reasons["ddp"] is None
    assert str(reasons["fsdp"]).endswith("set lora_dora false, or use ddp.")
    quantised = refuse(
        canonicalize({**LORA, "quantization": "nf4"}, workload, tiny.CPU), workload, tiny.CPU
    )
    assert str(quantised).endswith("set lora_dora false, or quantization none.")
