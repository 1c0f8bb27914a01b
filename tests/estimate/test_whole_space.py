import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autofit.core.config import Config
from autofit.estimate.estimator import predict
from autofit.estimate.fake_device import workspace_bytes
from autofit.estimate.peak import peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.space_estimator import SpaceEstimator, predict_all
from autofit.techniques import canonicalize, refuse
from tests.estimate.traced import AMPERE, traced, transformer
from tests.tiny import CPU, llama_workload

# Large enough that a block's activations outweigh what is rounded and what the head needs.
WORKLOAD = replace(llama_workload(8, 64, num_hidden_layers=6, hidden_size=64, vocab_size=64), traits=None)


def _configs(hardware: Any, changes: list[dict[str, Any]]) -> Iterator[Config]:
    for knobs in changes:
        config = canonicalize(knobs, WORKLOAD, hardware)
        assert refuse(config, WORKLOAD, hardware) is None
        yield config


CHANGES: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2},
    {"micro_batch_size": 4, "activation_checkpointing": "full"},
    {"micro_batch_size": 2, "activation_checkpointing": "alternate"},
    {"micro_batch_size": 8, "activation_checkpointing": "selective", "precision": "bf16"},
    {"precision": "bf16-mixed", "micro_batch_size": 4},
    {"attention": "eager", "micro_batch_size": 4, "optimizer": "sgd"},
    {"lora_rank": 8, "lora_targets": "all-linear", "micro_batch_size": 4},
    {"lora_rank": 32, "lora_targets": "all-linear", "micro_batch_size": 8, "precision": "bf16"},
    {"lora_rank": 8, "lora_targets": "all-linear", "quantization": "nf4", "micro_batch_size": 4, "precision": "bf16"},
    {"optimizer": "adamw-foreach", "micro_batch_size": 4},
]


@pytest.mark.parametrize(("hardware", "changes"), [(CPU, CHANGES[:6]), (AMPERE, CHANGES[3:])], ids=["cpu", "cuda"])
def test_combined_segments_give_what_a_full_trace_gives(hardware: Any, changes: list[dict[str, Any]]) -> None:
    configs = list(_configs(hardware, changes))
    predictions = SpaceEstimator(WORKLOAD, hardware, UNKNOWN, configs).predict()
    full = [peak_of(traced(WORKLOAD, hardware, **config), hardware).nbytes for config in configs]
    assert predictions.allocated == pytest.approx(np.array(full, float), rel=0.06)
    assert np.isfinite(predictions.seconds).all()


# A block's activations are many times what waits for its copy on the device, and the logits' chunks are of all kinds.
LONG = replace(
    llama_workload(32, 4096, num_hidden_layers=6, hidden_size=256, vocab_size=2048, max_position_embeddings=4096),
    traits=None,
)
LORA: dict[str, Any] = {"lora_rank": 8, "lora_targets": "all-linear", "precision": "bf16", "activation_offload": "cpu"}
FAR: dict[str, dict[str, Any]] = {
    "offloaded": {"micro_batch_size": 8, "activation_offload": "cpu"},
    "offloaded, mixed": {"micro_batch_size": 8, "activation_offload": "cpu", "precision": "bf16-mixed"},
    "offloaded, full": {"micro_batch_size": 32, "activation_offload": "cpu", "activation_checkpointing": "full"},
    "offloaded, selective": {
        "micro_batch_size": 8,
        "activation_offload": "cpu",
        "activation_checkpointing": "selective",
    },
    "offloaded, alternate": {
        "micro_batch_size": 8,
        "activation_offload": "cpu",
        "activation_checkpointing": "alternate",
    },
    "offloaded, nf4": {**LORA, "micro_batch_size": 8, "quantization": "nf4"},
    "offloaded, int8": {**LORA, "micro_batch_size": 8, "quantization": "int8"},
    "offloaded, chunked": {**LORA, "micro_batch_size": 4, "loss": "chunked"},
    "optimizer": {"micro_batch_size": 4, "optimizer_offload": "cpu"},
    "1 sample, chunked": {"micro_batch_size": 1, "loss": "chunked"},
    "2 samples, chunked": {**LORA, "activation_offload": "none", "micro_batch_size": 2, "loss": "chunked"},
    "32 samples, chunked": {"micro_batch_size": 32, "loss": "chunked", "activation_checkpointing": "full"},
    "1 sample, fused": {"micro_batch_size": 1, "loss": "fused"},
    "8 samples, fused": {"micro_batch_size": 8, "loss": "fused", "precision": "bf16", "attention": "flash"},
    "8 samples, liger": {"micro_batch_size": 8, "kernels": "liger", "precision": "bf16", "loss": "fused"},
    "liger, full": {
        **LORA,
        "activation_offload": "none",
        "activation_checkpointing": "full",
        "micro_batch_size": 8,
        "kernels": "liger",
    },
}
ELSEWHERE = replace(AMPERE, here=False)  # what is not installed here is not missing there


@pytest.fixture(scope="module")
def far() -> dict[str, tuple[float, float]]:
    """(bytes, seconds) of each of those configs, predicted at once."""
    configs = [canonicalize(knobs, LONG, ELSEWHERE) for knobs in FAR.values()]
    rough = SpaceEstimator(LONG, ELSEWHERE, UNKNOWN, configs).predict()
    return dict(zip(FAR, zip(rough.allocated, rough.seconds, strict=True), strict=True))


@pytest.mark.parametrize("name", FAR)
def test_bytes_and_seconds_of_offloading_and_of_chunks_are_those_of_a_full_trace(
    far: dict[str, tuple[float, float]], name: str
) -> None:
    full = predict(LONG, canonicalize(FAR[name], LONG, ELSEWHERE), ELSEWHERE, rates=UNKNOWN)
    nbytes, seconds = far[name]
    assert nbytes + workspace_bytes(ELSEWHERE) == pytest.approx(full.allocated_bytes, rel=0.05)
    assert seconds == pytest.approx(full.step_seconds, rel=0.05)


def test_chunks_of_a_model_of_few_blocks() -> None:
    workload = replace(llama_workload(8, 64, vocab_size=512), traits=None)
    configs = [canonicalize({"loss": "chunked", "micro_batch_size": size}, workload, CPU) for size in (1, 8)]
    rough = SpaceEstimator(workload, CPU, UNKNOWN, configs).predict()
    full = [peak_of(traced(workload, CPU, **config), CPU).nbytes for config in configs]
    assert rough.allocated == pytest.approx(np.array(full, float), rel=0.06)


def test_flash_is_refused_where_a_mask_is_needed_and_as_fast_as_sdpa_where_none_is() -> None:
    masked = {"model_type": "mistral", "sliding_window": 16}
    for changes, fits in ((masked, False), ({}, True)):
        workload = replace(llama_workload(8, 64, num_hidden_layers=7, **changes), traits=None)
        configs = [
            canonicalize({"attention": each, "precision": "bf16"}, workload, AMPERE) for each in ("sdpa", "flash")
        ]
        rough = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict()
        assert np.isfinite(rough.allocated).tolist() == [True, fits]
        assert not fits or rough.allocated[0] == rough.allocated[1]


def test_a_budget_of_recomputation_lies_between_its_ends_as_they_are_uncompiled() -> None:
    workload, card = replace(LONG, traits=transformer().traits), replace(AMPERE, here=False)
    kinds = [("full", "none"), ("budget-0.5", "default"), ("none", "none")]
    knobs = [{"activation_checkpointing": kind, "compile": way, "micro_batch_size": 4} for kind, way in kinds]
    configs = [canonicalize(each, workload, card) for each in knobs]
    assert configs[1]["activation_checkpointing"] == "budget-0.5"
    least, within, most = SpaceEstimator(workload, card, UNKNOWN, configs).predict().allocated
    assert within == pytest.approx((least + most) / 2, rel=1e-6)


@pytest.mark.parametrize("checkpointing", ["none", "alternate", "full"])
def test_compiled_transformers_keep_as_little_as_one_estimate_alone_says(checkpointing: str) -> None:
    workload = replace(LONG, traits=transformer().traits)
    card = replace(AMPERE, here=False)  # of another machine: whether a compiler is installed here says nothing
    knobs = {"activation_checkpointing": checkpointing, "compile": "default", "micro_batch_size": 4}
    configs = [canonicalize({**knobs, "compile": kind}, workload, card) for kind in ("none", "default")]
    rough = SpaceEstimator(workload, card, UNKNOWN, configs).predict().allocated
    eager, compiled = (predict(workload, config, card).allocated_bytes for config in configs)
    assert rough[1] - rough[0] == pytest.approx(compiled - eager, rel=0.05)
    assert (compiled < eager) is (checkpointing != "full")


def test_more_arithmetic_takes_longer() -> None:
    plain, again = _configs(AMPERE, [{}, {"activation_checkpointing": "full"}])
    rough = SpaceEstimator(WORKLOAD, AMPERE, UNKNOWN, [plain, again]).predict()
    assert rough.seconds[1] > rough.seconds[0]


def test_predictions_are_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = list(_configs(CPU, CHANGES[:2]))
    first = predict_all(WORKLOAD, CPU, configs)
    monkeypatch.setattr(sys.modules[predict_all.__module__], "trace", None)  # nothing can be traced from here on
    assert predict_all(WORKLOAD, CPU, configs) == first
    with pytest.raises(TypeError):
        predict_all(WORKLOAD, CPU, configs[:1])


def test_offloading_takes_bytes_off_the_device() -> None:
    knobs = {"lora_rank": 8, "lora_targets": "all-linear", "precision": "bf16"}
    changes = [knobs, {**knobs, "parameter_offload": "cpu"}]
    plain, streamed = SpaceEstimator(WORKLOAD, AMPERE, UNKNOWN, list(_configs(AMPERE, changes))).predict().allocated
    assert streamed < plain
