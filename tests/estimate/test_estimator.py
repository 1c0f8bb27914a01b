"""What compiled code is expected to need on CUDA: less than the eager operations do."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.estimate import Estimate
from autofit.core.workload import Workload
from autofit.estimate.estimator import predict
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.roofline import STALLS
from tests import tiny
from tests.estimate.traced import AMPERE, transformer
from tests.tiny import CPU, llama_workload

# of another machine: whether a compiler is installed here says nothing
CARD = replace(AMPERE, here=False)


def pair(workload: Workload, hardware: Any = CARD, **knobs: Any) -> tuple[Estimate, Estimate]:
    """Eager and compiled."""
    return predict(workload, knobs, hardware), predict(
        workload, {**knobs, "compile": "default"}, hardware
    )


@pytest.mark.parametrize(
    ("checkpointing", "share"),
    [("none", 0.23), ("alternate", 0.18), ("selective", 0.05), ("full", 0.0)],
)
def test_a_share_of_a_transformers_activations_is_not_kept(
    checkpointing: str, share: float
) -> None:
    eager, compiled = pair(transformer(), activation_checkpointing=checkpointing)
    again = share * eager.breakdown["activations"]
    assert eager.allocated_bytes - compiled.allocated_bytes == pytest.approx(again, abs=2)
    assert eager.breakdown["activations"] - compiled.breakdown["activations"] == pytest.approx(
        again, abs=2
    )
    assert eager.reserved_bytes is not None
    assert compiled.reserved_bytes is not None
    assert eager.reserved_bytes - compiled.reserved_bytes == pytest.approx(again, abs=2)
    middle = compiled.reserved_bytes + compiled.breakdown["context"]
    assert compiled.low < middle < compiled.high
    assert any("compute again" in note for note in compiled.notes)


def test_a_config_within_a_budget_of_recomputation_is_predicted() -> None:
    """As one that keeps all: what the compiler computes again is not known."""
    within = predict(
        transformer(), {"activation_checkpointing": "budget-0.5", "compile": "default"}, CARD
    )
    assert within.allocated_bytes == predict(transformer(), {}, CARD).allocated_bytes


def test_offloaded_activations_stay_what_they_are() -> None:
    eager, compiled = pair(transformer(), activation_offload="cpu")
    assert compiled.allocated_bytes == eager.allocated_bytes


def test_of_other_models_the_interval_is_wide() -> None:
    eager, compiled = pair(tiny.mlp_workload())
    assert compiled.allocated_bytes == eager.allocated_bytes
    assert compiled.high > 1.1 * eager.high - eager.breakdown["context"]
    assert any("wide interval" in note for note in compiled.notes)


def test_on_a_cpu_nothing_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """There compiled code was seen to need between 27 % less and 15 % more."""
    monkeypatch.setattr("autofit.techniques.compile.BACKEND", "aot_eager")
    eager, compiled = pair(transformer(), CPU)
    assert compiled.allocated_bytes == eager.allocated_bytes
    assert compiled.low < eager.low
    assert compiled.high > eager.high


def test_no_more_than_the_peak_rate_is_put_to_use_where_formats_are_mixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """int8 layers multiply fast in the forward and in bf16 in the backward."""
    monkeypatch.delitem(STALLS, "aten::_int_mm")  # as if no layer waited either
    fast = replace(
        UNKNOWN,
        matmul={**UNKNOWN.matmul, "int8": 1e18},
        bandwidth=1e18,
        launch_seconds=0,
        pass_seconds=0,
    )
    knobs = {
        "precision": "bf16",
        "quantization": "int8",
        "lora_rank": 1,
        "lora_targets": "all-linear",
    }
    mixed = predict(
        replace(llama_workload(4, 16, hidden_size=128), traits=None), knobs, CARD, rates=fast
    )
    assert mixed.utilisation is not None
    assert 0.5 < mixed.utilisation <= 1
