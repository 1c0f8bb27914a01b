"""teacher_precision: a teacher in few bits takes less memory, and teaches nearly the same."""

from typing import Any

import pytest
import torch

from autofit.core.config import Value
from autofit.setup.quantised_layers import dequantised
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny

TEACHER = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
WORKLOAD = tiny.preference_workload("distill", 4, frozen={"teacher": tiny.llama(**TEACHER)})


def trained(value: Value) -> tuple[list[float], int, Any]:
    """The losses of two steps, the bytes of the teacher's weights, and the setup, which is closed."""
    setup = build(WORKLOAD, {"teacher_precision": value}, tiny.CPU)
    losses = [float(train_step(setup, WORKLOAD.batch(4))) for _ in range(2)]
    weights = setup.frozen["teacher"].parameters()
    setup.close()
    return losses, sum(weight.untyped_storage().nbytes() for weight in weights), setup


def test_it_says_nearly_the_same_in_less_memory() -> None:
    expected, whole, _ = trained("none")
    assert expected[1] < expected[0]
    for value, share in (("int8", 0.5), ("nf4", 0.4)):
        losses, nbytes, setup = trained(value)
        assert losses == pytest.approx(expected, rel=0.05)
        assert losses != expected
        assert nbytes < share * whole
        assert not any(weight.requires_grad for weight in setup.frozen["teacher"].parameters())


def test_weights_are_those_of_the_teacher_that_was_given() -> None:
    teacher = tiny.llama(**TEACHER)()
    layer = teacher.model.layers[0].mlp.up_proj
    given = layer.weight.detach().clone()
    workload = tiny.preference_workload("distill", 4, frozen={"teacher": lambda: teacher})
    model = tiny.llama()()
    setup = build(workload, {"teacher_precision": "nf4"}, tiny.CPU, model=model)
    stored = dequantised(setup.frozen["teacher"].model.layers[0].mlp.up_proj, torch.float32)
    error = (stored.weight - given).norm() / given.norm()
    setup.close()
    assert 0 < float(error) < 0.12


def test_it_is_offered_where_there_is_a_teacher() -> None:
    technique = technique_named("teacher_precision")
    assert technique.choices_for(WORKLOAD, tiny.CPU) == ("none", "int8", "nf4")
    for workload in (tiny.llama_workload(), tiny.preference_workload("dpo")):
        assert technique.choices_for(workload, tiny.CPU) == ("none",)
        knobs = canonicalize({"teacher_precision": "nf4"}, workload, tiny.CPU)
        assert "asks no other model" in str(refuse(knobs, workload, tiny.CPU))
