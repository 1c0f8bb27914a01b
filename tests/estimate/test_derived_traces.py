from typing import Any

import numpy as np
import pytest

from autofit.core.config import Config
from autofit.estimate.derived_traces import DerivedTrace, derived_trace
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.techniques import canonicalize
from tests.tiny import CPU, llama_workload

WORKLOAD = llama_workload(8, 64, num_hidden_layers=6, hidden_size=64, vocab_size=64)
ADAPTERS: dict[str, Any] = {
    "lora_rank": 8,
    "lora_targets": "all-linear",
    "precision": "bf16",
    "micro_batch_size": 4,
}
QUANTISED = {**ADAPTERS, "quantization": "nf4"}


def _config(knobs: dict[str, Any], attention: str) -> Config:
    return canonicalize({**knobs, "attention": attention}, WORKLOAD, CPU)


def test_another_attention_is_known_from_weights_without_adapters_or_else_from_those_not_quantised() -> (
    None
):
    full, lora, quantised = (
        tuple(_config(each, attention) for attention in ("eager", "sdpa"))
        for each in ({"precision": "bf16", "micro_batch_size": 4}, ADAPTERS, QUANTISED)
    )
    every = {*full, *lora, *quantised}
    assert derived_trace(quantised[0], every) == DerivedTrace(quantised[1], *full)
    assert derived_trace(quantised[0], every - {full[0]}) == DerivedTrace(quantised[1], *lora)
    assert derived_trace(quantised[0], every - {full[0], lora[0]}) is None
    assert derived_trace(quantised[0], every - {quantised[1]}) is None
    assert derived_trace(full[0], every) is None
    assert derived_trace(quantised[1], every) is None


@pytest.mark.parametrize(
    "more", [{}, {"activation_checkpointing": "full"}], ids=["resident", "checkpointed"]
)
def test_what_is_known_from_others_is_what_its_own_trace_gives(more: dict[str, Any]) -> None:
    alone = [_config({**QUANTISED, **more}, "eager")]
    beside = [
        _config({**each, **more}, attention)
        for each in (ADAPTERS, QUANTISED)
        for attention in ("sdpa", "eager")
    ]
    derived = SpaceEstimator(WORKLOAD, CPU, UNKNOWN, beside)
    found, traced = derived.predict(), SpaceEstimator(WORKLOAD, CPU, UNKNOWN, alone).predict()
    assert found.seconds[-1] == pytest.approx(traced.seconds[0], rel=1e-9)
    assert found.allocated[-1] == pytest.approx(traced.allocated[0], rel=0.04)
    assert np.isfinite(found.allocated).all()
