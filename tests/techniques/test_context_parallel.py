"""context_parallel: 1 unless told, beside fsdp alone, and for causal language models; what it does to a run is in
training/test_tensor_and_context_ranks.py."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.core.layout import Layout
from autofit.core.workload import Traits
from autofit.techniques import canonicalize, refuse, technique_named
from tests import tiny
from tests.techniques.test_data_parallel import EIGHT, WORKLOAD, canonical

TRAITS = Traits(
    parameters=1, blocks=2, linears=1, attention=True, sdpa=True, batch_norm=False, dropout=False
)


def test_what_it_is() -> None:
    assert canonicalize({}, WORKLOAD, tiny.CPU)["context_parallel"] is None
    assert canonical()["context_parallel"] == 1
    assert technique_named("context_parallel").choices(EIGHT) == (1, 2, 4)


def test_only_what_can_be_cut_is_searched() -> None:
    choices = technique_named("context_parallel").choices_for
    assert choices(WORKLOAD, EIGHT) == (1, 2, 4)
    assert choices(replace(WORKLOAD, traits=replace(TRAITS, heads=6)), EIGHT) == (1, 2)
    assert choices(tiny.bert_workload(16), EIGHT) == (1,)


def test_what_it_cannot_be() -> None:
    with pytest.raises(
        InputError, match="context_parallel 3 does not divide the 4 devices of a node"
    ):
        canonical(context_parallel=3)


def test_weights_are_divided_over_its_devices_and_samples_are_not() -> None:
    config = canonical(context_parallel=4, reshard_after_forward=4)
    assert (config["data_parallel"], Layout.of(config)) == ("fsdp", Layout(1, 2, 4, 1))
    assert config["micro_batch_size"] == 8
    assert refuse(config, WORKLOAD, EIGHT) is None
    assert "no smaller part of 8 shards" in str(
        refuse(config.replace(reshard_after_forward=8), WORKLOAD, EIGHT)
    )


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        (
            {"data_parallel": "ddp"},
            "ddp was not tried beside tensor_parallel or context_parallel; use fsdp",
        ),
        ({"data_parallel": "none"}, "context_parallel adds up gradients as fsdp does; use fsdp"),
        ({"attention": "eager"}, "use sdpa"),
    ],
)
def test_what_does_not_go_together_is_refused(knobs: dict[str, Any], reason: str) -> None:
    assert reason in str(refuse(canonical(context_parallel=2, **knobs), WORKLOAD, EIGHT))


def test_packed_samples_that_do_not_see_one_another_are_not_cut() -> None:
    apart = replace(WORKLOAD, document_tokens=8)
    assert "need a mask, which is not exchanged" in str(
        refuse(canonical(context_parallel=2), apart, EIGHT)
    )


def test_only_causal_language_models_are_cut() -> None:
    for workload in (
        tiny.bert_workload(16),
        replace(WORKLOAD, loss=lambda model, batch: model(**batch).loss),
    ):
        config = canonicalize({"context_parallel": 2}, workload, EIGHT)
        assert "only samples of causal language models are cut" in str(
            refuse(config, workload, EIGHT)
        )
