"""Parts of a model that are trained alone: found from names, frozen around, and made again."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.models import resolve, with_parts, workload_from_source
from autofit.models.trained_parts import is_inside, parts_of, train_parts
from autofit.training.meta_model import meta_model_from
from tests import tiny

NAMES = st.lists(
    st.lists(st.sampled_from(["model", "layers", "1", "10", "mlp", "weight"]), min_size=1).map(
        ".".join
    ),
    unique=True,
    min_size=1,
)


def trained(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@given(names=NAMES, data=st.data())
def test_parts_hold_what_is_trained_and_nothing_else(names: list[str], data: Any) -> None:
    # as of a model: no parameter has parameters inside
    names = [
        name
        for name in names
        if not any(is_inside(other, (name,)) for other in names if other != name)
    ]
    chosen = set(data.draw(st.lists(st.sampled_from(names))) if names else ())
    parts = parts_of(chosen, names)
    assert {name for name in names if is_inside(name, parts)} == chosen
    assert len(parts) <= len(chosen)
    for part in parts:  # none could be left out
        others = [other for other in parts if other != part]
        assert any(is_inside(name, (part,)) and not is_inside(name, others) for name in names)


def test_a_part_is_a_whole_module() -> None:
    names = ["layers.1.a.weight", "layers.1.a.bias", "layers.10.a.weight", "head.weight"]
    assert parts_of({*names[:2], "head.weight"}, names) == ("layers.1", "head")
    assert not is_inside("layers.10.a.weight", ("layers.1",))
    assert parts_of({"layers.1.a.weight"}, names) == ("layers.1.a.weight",)


def test_all_else_is_frozen() -> None:
    model = tiny.llama()()
    train_parts(model, ("model.layers.1.mlp", "lm_head"))
    gate, up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    assert trained(model) == {gate, up, down, "lm_head.weight"}
    with pytest.raises(InputError, match=r"no part named 'model\.layers\.7'"):
        train_parts(model, ("lm_head", "model.layers.7"))


def test_what_is_trained_is_made_again_from_a_result() -> None:
    workload = resolve("smollm2-135m", sequence_length=64, effective_batch_size=4)
    parts = ("model.layers.29", "model.norm")
    frozen = with_parts(workload, parts, asks_inputs=True)
    assert "only model.layers.29, model.norm is trained" in " ".join(frozen.notes)
    assert (frozen.sequence_length, frozen.effective_batch_size) == (64, 4)

    again = workload_from_source(frozen.source, frozen.summary())
    assert again.model == frozen.model
    names = trained(meta_model_from(again.model))
    assert all(is_inside(name, parts) for name in names) and len(names) == 10
    assert with_parts(workload, ()) is workload

    wrong = {**frozen.source, "parts": "model.norm"}
    with pytest.raises(InputError, match="must be a list of names"):
        workload_from_source(wrong, frozen.summary())


def test_gradients_flow_back_to_what_frozen_embeddings_give() -> None:
    last = replace(tiny.llama(), parts=("lm_head",))
    batch = tiny.llama_workload().batch(1)
    for asks in (False, True):
        model = replace(last, asks_inputs=asks)()
        hidden = model(**batch, output_hidden_states=True).hidden_states
        assert all(states.requires_grad is asks for states in hidden)
