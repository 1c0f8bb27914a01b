"""lora_targets: null without a rank, all-linear beside one, refused where there is no attention."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from autofit.core.config import Value
from autofit.core.errors import InputError
from autofit.core.workload import Traits, Workload
from autofit.setup.layers import output_head
from autofit.techniques import canonicalize, refuse, technique_named
from tests import tiny
from tests.techniques.contract import WORKLOADS, Effect, built
from tests.techniques.test_lora_rank import sees_adapters

TRAITS = Traits(
    parameters=1, blocks=2, linears=3, attention=False, sdpa=True, batch_norm=False, dropout=False
)


def test_it_means_nothing_without_a_rank() -> None:
    workload = tiny.transformer_workload()
    assert canonicalize({"lora_targets": "attention"}, workload, tiny.CPU)["lora_targets"] is None
    assert canonicalize({"lora_rank": 4}, workload, tiny.CPU)["lora_targets"] == "all-linear"
    knobs = {"lora_rank": 4, "lora_targets": "attention"}
    assert canonicalize(knobs, workload, tiny.CPU)["lora_targets"] == "attention"


def test_the_head_is_no_target_of_its_own_where_it_is_trained_whole() -> None:
    knobs = {"lora_rank": 4, "lora_targets": "all-linear+head"}
    assert (
        canonicalize(knobs, tiny.transformer_workload(), tiny.CPU)["lora_targets"]
        == "all-linear+head"
    )
    classifier = replace(tiny.transformer_workload(), task="sequence-classification")
    assert canonicalize(knobs, classifier, tiny.CPU)["lora_targets"] == "all-linear"


def test_a_model_without_attention_layers_is_refused() -> None:
    workload = replace(tiny.transformer_workload(), traits=TRAITS)
    config = canonicalize({"lora_rank": 4, "lora_targets": "attention"}, workload, tiny.CPU)
    assert (
        refuse(config, workload, tiny.CPU)
        == "lora_targets: the model has no attention layers; use all-linear."
    )
    assert refuse(config.replace(lora_targets="all-linear"), workload, tiny.CPU) is None
    workload = replace(workload, traits=replace(TRAITS, attention=True))
    assert refuse(config, workload, tiny.CPU) is None


def test_more_layers_learn_more_faithfully_and_need_more() -> None:
    technique = technique_named("lora_targets")
    for rank in (technique.fidelity, technique.memory_order):
        assert rank("attention") < rank("all-linear") < rank("all-linear+head")
    assert technique.memory_order(None) is None


def test_names_are_words_joined_by_plus_in_one_order() -> None:
    workload = tiny.transformer_workload()

    def settled(targets: str, workload: Workload = workload) -> Value:
        return canonicalize({"lora_rank": 4, "lora_targets": targets}, workload, tiny.CPU)[
            "lora_targets"
        ]

    assert settled("v_proj+q_proj") == settled("q_proj+v_proj+q_proj") == "q_proj+v_proj"
    assert settled("experts+attention") == "attention+experts"
    assert settled("head+all-linear") == "all-linear+head"
    classifier = replace(workload, task="sequence-classification")
    assert [settled(each, classifier) for each in ("q_proj+head", "head")] == ["q_proj", "head"]
    for wrong in ("all-linaer", "q_proj v_proj", "q_proj+", "", "q_proj,v_proj"):
        with pytest.raises(
            InputError, match=r"lora_targets cannot be .* It takes attention, .*q_proj\+v_proj"
        ):
            settled(wrong)


def test_a_mixture_is_offered_its_experts() -> None:
    technique, workload = technique_named("lora_targets"), tiny.transformer_workload()
    mixture = replace(workload, traits=replace(TRAITS, experts="experts"))
    assert technique.choices_for(workload, tiny.CPU) == technique.values
    added = "attention+experts", "all-linear+experts"
    assert technique.choices_for(mixture, tiny.CPU) == (*technique.values, *added)


OFF = {}


def beside(value):
    return {"lora_rank": 4}


def shows(effect: Effect) -> None:
    head = output_head(effect.off.model)
    chosen: dict[str, Callable[[str, nn.Linear], bool]] = {
        "attention": lambda name, each: "attn" in name,
        "all-linear": lambda name, each: each is not head,
        "all-linear+head": lambda name, each: True,
    }
    sees_adapters(effect, 4, chosen[effect.value])


def test_the_attention_targets_are_a_part_of_all_linear_and_that_of_the_head_too() -> None:
    workload = WORKLOADS["llama"]
    trained = [
        {key for key, _ in built(workload, {"lora_rank": 4, "lora_targets": targets}).trainable()}
        for targets in technique_named("lora_targets").values
    ]
    assert trained[0] < trained[1] < trained[2]
