"""Predictions for losses that ask other models, or all samples of a batch at once."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autofit.core.workload import Workload
from autofit.estimate.estimator import predict
from autofit.estimate.peak import host_bytes_of, peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.estimate.trace import trace
from autofit.models.huggingface import huggingface_workload
from autofit.techniques import canonicalize
from tests import tiny
from tests.estimate.traced import AMPERE, peak, traced, tracked

LORA: dict[str, Any] = {"lora_rank": 8, "micro_batch_size": 4}
OFF: dict[str, Any] = {**LORA, "reference": "adapter-off"}
CHUNKED: dict[str, Any] = {"loss": "chunked"}
CASES: dict[str, list[dict[str, Any]]] = {
    "dpo": [
        {"micro_batch_size": 2},
        {"micro_batch_size": 4, "reference": "precomputed"},
        OFF,
        {"micro_batch_size": 4, "activation_checkpointing": "alternate", **CHUNKED},
        {**OFF, **CHUNKED, "quantization": "nf4", "precision": "bf16"},
        {**OFF, **CHUNKED, "activation_checkpointing": "full", "precision": "bf16-mixed"},
    ],
    "kto": [{"micro_batch_size": 4}, {**OFF, **CHUNKED}],
    "orpo": [{"micro_batch_size": 4}, {"micro_batch_size": 4, **CHUNKED}],
    "distill": [
        {"micro_batch_size": 2},
        {**LORA, **CHUNKED},
        {**LORA, "teacher_precision": "nf4"},
        {**LORA, "teacher_precision": "int8", "precision": "bf16"},
    ],
    "embed": [
        {"micro_batch_size": 2},
        {"micro_batch_size": 4, "activation_checkpointing": "full"},
        LORA,
    ],
}


TOP_K = "distill, top k"
CASES[TOP_K] = CASES["distill"][:2]


def workload_of(task: str, blocks: int = 5) -> Workload:
    """Blocks of which a space traces three, or four of six where it checkpoints every second; and a teacher that it
    traces whole."""
    deep = {"num_hidden_layers": blocks, "hidden_size": 64}
    frozen = {}
    options = {"top_k": 8} if task == TOP_K else None
    task = task.partition(",")[0]
    model = replace(tiny.llama(**deep, vocab_size=64), task=task)
    if task == "embed":
        model = tiny.bert(**deep, intermediate_size=256, max_position_embeddings=64)
    if task == "distill":
        frozen = {"teacher": tiny.llama(hidden_size=96, num_attention_heads=4)}
    made = huggingface_workload(
        model,
        sequence_length=32,
        effective_batch_size=8,
        frozen=frozen,
        loss_options=options,
    )
    return replace(made, traits=None)


@pytest.mark.parametrize(
    ("task", "hardware", "cases"),
    [
        ("dpo", tiny.CPU, [{}, OFF, {**OFF, **CHUNKED}]),
        *((task, AMPERE, cases) for task, cases in CASES.items()),
    ],
)
def test_a_space_predicts_what_whole_traces_do(
    task: str, hardware: Any, cases: list[dict[str, Any]]
) -> None:
    every_second = any(knobs.get("activation_checkpointing") == "alternate" for knobs in cases)
    workload = workload_of(task, blocks=6 if every_second else 5)
    configs = [canonicalize(knobs, workload, hardware) for knobs in cases]
    found = SpaceEstimator(workload, hardware, UNKNOWN, configs).predict()
    whole = [peak_of(trace(workload, config, hardware), hardware).nbytes for config in configs]
    # a loss over all samples of a batch of 8 is traced in the space with as many as a prime
    assert found.allocated == pytest.approx(np.array(whole, float), rel=0.001)


def test_a_reference_in_every_step_takes_the_forward_of_all_its_blocks() -> None:
    workload = workload_of("dpo")
    configs = [
        canonicalize({"micro_batch_size": 2, "reference": value}, workload, AMPERE)
        for value in ("resident", "precomputed")
    ]
    together = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict().seconds
    alone = [predict(workload, config, AMPERE, rates=UNKNOWN).step_seconds for config in configs]
    assert None not in alone
    assert together[0] - together[1] == pytest.approx(alone[0] - alone[1], rel=0.05)  # type: ignore[operator]
    assert together[0] > 1.1 * together[1]


def test_a_reference_on_the_host_leaves_two_blocks_on_the_device() -> None:
    wide = {"num_hidden_layers": 5, "hidden_size": 256, "intermediate_size": 512}
    model = replace(tiny.llama(**wide, vocab_size=64), task="dpo")
    workload = huggingface_workload(model, sequence_length=32, effective_batch_size=8)
    workload = replace(workload, traits=None)
    configs = [
        canonicalize({"micro_batch_size": 2, "reference": value, **more}, workload, AMPERE)
        for more in ({}, CHUNKED)
        for value in ("resident", "offloaded")
    ]
    found = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict()
    traces = [trace(workload, config, AMPERE) for config in configs]
    whole = [peak_of(each, AMPERE).nbytes for each in traces]
    assert found.allocated == pytest.approx(np.array(whole, float), rel=0.001)

    blocks = 4 * (4 * 256 * 256 + 3 * 256 * 512)  # grouped queries make it a little less
    saved = found.allocated[0] - found.allocated[1]
    assert saved == pytest.approx(3 * blocks, rel=0.2)
    assert host_bytes_of(traces[1]) == pytest.approx(found.on_host[1], rel=0.01)
    # One of the five blocks is there twice while it is put together.
    assert found.on_host[1] == pytest.approx(6 / 3 * saved, rel=0.01)
    assert found.seconds[1] > found.seconds[0]


def test_a_batch_that_is_replayed_takes_a_second_forward() -> None:
    workload = workload_of("embed")
    plain = replace(workload, loss=functools.partial(_at_once, workload.loss))
    config = canonicalize({"micro_batch_size": 2}, workload, AMPERE)
    seconds = [
        SpaceEstimator(each, AMPERE, UNKNOWN, [config]).predict().seconds[0]
        for each in (workload, plain)
    ]
    assert 1.15 < seconds[0] / seconds[1] < 1.6


def _at_once(loss: Any, model: Any, batch: Any) -> Any:
    return loss(model, batch)


@pytest.mark.parametrize(
    ("task", "knobs"),
    [
        ("dpo", {"micro_batch_size": 2}),
        ("dpo", OFF),
        ("kto", {"micro_batch_size": 2}),
        ("orpo", {"micro_batch_size": 2}),
        ("distill", {"micro_batch_size": 2}),
        ("dpo", {"micro_batch_size": 2, **CHUNKED}),
        ("dpo", {**OFF, **CHUNKED}),
        ("kto", {"micro_batch_size": 2, **CHUNKED}),
        ("distill", {**LORA, **CHUNKED}),
        (TOP_K, {"micro_batch_size": 2}),
        (TOP_K, {**LORA, **CHUNKED}),
        ("distill", {**LORA, "teacher_precision": "nf4"}),
        ("distill", {"micro_batch_size": 2, "teacher_precision": "int8", "precision": "bf16"}),
    ],
)
def test_a_trace_takes_what_a_step_takes(task: str, knobs: dict[str, Any]) -> None:
    workload = workload_of(task, blocks=2)
    assert peak(traced(workload, **knobs)) == tracked(workload, knobs)


def test_less_of_a_teacher_takes_less_memory() -> None:
    knobs = {"micro_batch_size": 2}
    whole = peak(traced(workload_of("distill", blocks=2), **knobs))
    most_likely = peak(traced(workload_of(TOP_K, blocks=2), **knobs))
    assert most_likely < whole


def test_a_reference_that_is_precomputed_or_off_takes_no_memory() -> None:
    workload = workload_of("dpo", blocks=2)
    bytes_of = {
        value: peak(traced(workload, **LORA, reference=value))
        for value in ("resident", "adapter-off", "precomputed")
    }
    weights = 4 * sum(weight.numel() for weight in workload.model().parameters())
    assert bytes_of["resident"] == pytest.approx(bytes_of["adapter-off"] + weights, rel=0.001)
    assert bytes_of["precomputed"] <= bytes_of["adapter-off"]
