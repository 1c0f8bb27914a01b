import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autofit.core.config import Config
from autofit.core.estimate import Estimate
from autofit.core.workload import Traits, Workload
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.estimator import predict
from autofit.estimate.figures import HOST_TOO_SMALL, predict_all
from autofit.estimate.peak import peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.space_estimator import SpaceEstimator, SpacePredictions
from autofit.techniques import canonicalize, refuse
from tests.estimate.traced import AMPERE, traced
from tests.tiny import CPU, llama_workload

# Large enough that a block's activations outweigh what is rounded and what the head needs.
WORKLOAD = replace(
    llama_workload(8, 64, num_hidden_layers=6, hidden_size=64, vocab_size=64), traits=None
)


def _configs(
    hardware: Any, changes: list[dict[str, Any]], workload: Workload = WORKLOAD
) -> Iterator[Config]:
    for knobs in changes:
        config = canonicalize(knobs, workload, hardware)
        assert refuse(config, workload, hardware) is None
        yield config


CHANGES: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2},
    {"micro_batch_size": 4, "activation_checkpointing": "full"},
    {"micro_batch_size": 2, "activation_checkpointing": "alternate"},
    {"micro_batch_size": 8, "activation_checkpointing": "selective", "precision": "bf16"},
    {"precision": "bf16-mixed", "micro_batch_size": 4},
    {"head_only": True, "micro_batch_size": 4},
    {"attention": "eager", "micro_batch_size": 4, "optimizer": "sgd"},
    {"lora_rank": 8, "lora_targets": "all-linear", "micro_batch_size": 4},
    {"lora_rank": 32, "lora_targets": "all-linear", "micro_batch_size": 8, "precision": "bf16"},
    {
        "lora_rank": 8,
        "lora_targets": "all-linear",
        "quantization": "nf4",
        "micro_batch_size": 4,
        "precision": "bf16",
    },
    {"optimizer": "adamw-foreach", "micro_batch_size": 4},
]


@pytest.fixture(scope="module")
def near() -> dict[str, SpacePredictions]:
    """Predictions on each device. On the card's, after all changes: checkpointed blocks."""
    asked = {
        "cpu": (CPU, CHANGES[:4]),
        "cuda": (AMPERE, [*CHANGES, {"activation_checkpointing": "full"}]),
    }
    return {
        name: SpaceEstimator(
            WORKLOAD, hardware, UNKNOWN, list(_configs(hardware, changes))
        ).predict()
        for name, (hardware, changes) in asked.items()
    }


@pytest.mark.parametrize(
    ("hardware", "part"), [(CPU, slice(4)), (AMPERE, slice(3, 12))], ids=["cpu", "cuda"]
)
def test_combined_segments_give_what_a_full_trace_gives(
    near: dict[str, SpacePredictions], hardware: Any, part: slice
) -> None:
    predictions = near[hardware.device]
    configs = _configs(hardware, CHANGES[part])
    full = [peak_of(traced(WORKLOAD, hardware, **config), hardware).nbytes for config in configs]
    assert predictions.allocated[part] == pytest.approx(np.array(full, float), rel=0.06)
    assert np.isfinite(predictions.seconds).all()


def test_more_arithmetic_takes_longer(near: dict[str, SpacePredictions]) -> None:
    plain, again = near["cuda"].seconds[[0, len(CHANGES)]]
    assert again > plain


def test_streamed_weights_leave_the_device_and_their_constants_stay() -> None:
    """On an H200 the constants of NF4 were 390 MiB of an 8B model."""
    workload = llama_workload(1, 16, num_hidden_layers=4, hidden_size=512, intermediate_size=1024)
    lora = {"lora_rank": 8, "lora_targets": "all-linear", "precision": "bf16"}
    places = {"nf4": ("none", "cpu:3", "cpu"), "nf4-dq": ("none", "cpu"), "int8": ("none", "cpu")}
    changes = [
        {**lora, "quantization": value, "parameter_offload": where}
        for value, of_weights in places.items()
        for where in of_weights
    ]
    configs = list(_configs(AMPERE, changes, workload))
    predicted = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict().allocated
    full = [peak_of(traced(workload, AMPERE, **config), AMPERE).nbytes for config in configs]
    assert predicted == pytest.approx(np.array(full, float), rel=0.004)
    for before, after in itertools.pairwise(range(len(changes))):
        if changes[before]["quantization"] == changes[after]["quantization"]:
            assert predicted[before] > predicted[after]


def test_what_some_blocks_keep_elsewhere_or_compute_again_is_told_apart() -> None:
    """The first blocks are checkpointed or offload what they save, others stream their weights."""
    pytest.importorskip("torchao")
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1408}
    workload = replace(llama_workload(4, 1024, **sizes, max_position_embeddings=1024), traits=None)
    lora = {
        "lora_rank": 8,
        "lora_targets": "all-linear",
        "precision": "bf16",
        "micro_batch_size": 4,
    }
    changes = [
        {**lora, "activation_offload": "cpu:5"},
        {**lora, "activation_offload": "cpu:6", "parameter_offload": "cpu:4"},
        {**lora, "activation_offload": "cpu:4", "activation_checkpointing": "full:4"},
        {**lora, "parameter_offload": "cpu:5", "activation_checkpointing": "full:3"},
        {"precision": "bf16", "micro_batch_size": 4, "optimizer_offload": "cpu:5"},
    ]
    configs = list(_configs(AMPERE, changes, workload))
    predicted = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict().allocated
    full = [peak_of(traced(workload, AMPERE, **config), AMPERE).nbytes for config in configs]
    assert predicted == pytest.approx(np.array(full, float), rel=0.03)


def test_trained_weights_that_are_streamed_leave_three_blocks_on_the_device() -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1024}
    workload = replace(llama_workload(4, 64, **sizes), traits=None)
    whole = {"precision": "bf16", "optimizer_in_backward": True, "activation_checkpointing": "full"}
    changes = [
        {**whole, "optimizer": optimizer, "parameter_offload": where}
        for optimizer in ("adamw",)
        for where in ("none", "cpu")
    ]
    in_8_bits = {**whole, "optimizer": "adamw-8bit", "parameter_offload": "cpu"}
    some = {**whole, "parameter_offload": "cpu:6"}
    predicted = _predicted_both_ways(workload, [*changes, in_8_bits, some])[:2]
    nbytes = np.array([each.allocated_bytes for each in predicted], float)
    block = 2 * (4 * 512 * 512 + 3 * 512 * 1024)
    assert nbytes[::2] - nbytes[1::2] == pytest.approx(np.full(1, 5.0 * block), rel=0.02)


def _predicted_both_ways(workload: Workload, changes: list[dict[str, Any]]) -> list[Estimate]:
    """The estimates of configs one by one, which those of a space agree with."""
    configs = list(_configs(AMPERE, changes, workload))
    figures = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict()
    full = [predict(workload, config, AMPERE, rates=UNKNOWN) for config in configs]
    nbytes, seconds, on_host = np.array(
        [[e.allocated_bytes, e.step_seconds, e.host_bytes] for e in full], float
    ).T
    assert figures.allocated == pytest.approx(nbytes - workspace_bytes(AMPERE), rel=0.002)
    assert figures.seconds == pytest.approx(seconds, rel=0.06)
    assert figures.on_host == pytest.approx(on_host, rel=0.002)
    return full


def test_what_the_host_holds_of_other_offloads_is_known_of_a_space_too() -> None:
    pytest.importorskip("bitsandbytes")
    workload = replace(
        llama_workload(64, 64, num_hidden_layers=4, hidden_size=256, intermediate_size=512),
        traits=None,
    )
    lora = {"precision": "bf16", "lora_rank": 8, "lora_targets": "all-linear"}
    changes = [
        {"precision": "bf16"},
        {"precision": "bf16", "optimizer_in_backward": True, "parameter_offload": "cpu"},
        {"precision": "bf16", "optimizer": "paged-adamw"},
        {**lora, "parameter_offload": "cpu"},
        {**lora, "parameter_offload": "cpu", "quantization": "nf4"},
    ]
    configs = list(_configs(AMPERE, changes, workload))
    found = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict().on_host
    expected = [predict(workload, config, AMPERE).host_bytes for config in configs]
    assert found[0] == expected[0] == 0
    assert found == pytest.approx(np.array(expected, float), rel=0.002)
    offloaded, plain = ({**lora, "activation_offload": where} for where in ("cpu", "none"))
    with_it, without = list(_configs(AMPERE, [offloaded, plain], workload))
    held = SpaceEstimator(workload, AMPERE, UNKNOWN, [with_it, without]).predict().on_host
    # Buffers of activations are powers of two, of which some stay unused.
    assert held[0] <= predict(workload, with_it, AMPERE).host_bytes <= 2.5 * held[0]
    assert held[1] == 0


def test_what_a_small_host_cannot_hold_needs_more_than_any_device_has() -> None:
    workload = replace(
        llama_workload(1, 16, num_hidden_layers=4, hidden_size=256, intermediate_size=512),
        traits=None,
    )
    lora = {"precision": "bf16", "lora_rank": 8, "lora_targets": "all-linear"}
    configs = list(_configs(AMPERE, [lora, {**lora, "parameter_offload": "cpu"}], workload))
    held = predict(workload, configs[1], AMPERE).host_bytes
    roomy, tight = (
        predict_all(workload, AMPERE, configs, host_bytes=limit) for limit in (held, held - 1)
    )
    assert roomy == predict_all(workload, AMPERE, configs)
    assert tight == ([roomy[0][0], HOST_TOO_SMALL], roomy[1])


def test_weights_that_the_host_updates_leave_it_with_two_blocks_and_three_of_gradients() -> None:
    pytest.importorskip("torchao")
    # Of blocks beyond 10 MiB, each of which the allocator gives a segment of its own.
    sizes = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2048}
    workload = replace(llama_workload(4, 64, **sizes), traits=None)
    changes = [
        {"precision": "bf16", "activation_checkpointing": again, "micro_batch_size": size, **where}
        for again, size in (("full", 4), ("none", 1))
        for where in (
            {"optimizer_offload": "cpu"},
            {"optimizer_offload": "cpu", "parameter_offload": "cpu"},
        )
    ]
    some = {**changes[1], "parameter_offload": "cpu:7"}
    full = _predicted_both_ways(workload, [*changes, some])[:4]
    block = 2 * (4 * 1024 * 1024 + 3 * 1024 * 2048)
    # Where gradients are added, eight blocks of weights and gradients become two and three.
    kept = [each.breakdown["parameters"] + each.breakdown["gradients"] for each in full]
    assert (kept[2] - kept[3]) / block == pytest.approx(11.0, abs=0.1)
    reserved = [each.reserved_bytes / each.allocated_bytes for each in full]
    assert max(reserved[1::2]) < 1.25  # earlier gradients are never all on the device


def _long(blocks: int) -> Workload:
    sizes = {"hidden_size": 256, "vocab_size": 2048, "max_position_embeddings": 4096}
    # What is known of compiled transformers holds of it.
    traits = Traits(
        10**7,
        blocks,
        linears=43,
        attention=True,
        sdpa=True,
        batch_norm=False,
        dropout=False,
        head=True,
    )
    return replace(llama_workload(32, 4096, num_hidden_layers=blocks, **sizes), traits=traits)


# A block's activations are many times what waits for its copy on the device, and the logits' chunks are of all kinds.
# Of four blocks one is left out of a trace; of six two, where every second one is checkpointed.
LONG, LONGER = _long(4), _long(6)
LORA: dict[str, Any] = {
    "lora_rank": 8,
    "lora_targets": "all-linear",
    "precision": "bf16",
    "activation_offload": "cpu",
}
FAR: dict[str, dict[str, Any]] = {
    "offloaded": {"micro_batch_size": 8, "activation_offload": "cpu"},
    "offloaded, full": {
        "micro_batch_size": 32,
        "activation_offload": "cpu",
        "activation_checkpointing": "full",
        "precision": "bf16-mixed",
    },
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
    "1 block of the rest plain": {"micro_batch_size": 8, "activation_checkpointing": "full:1"},
    "some blocks, the rest selective": {
        "micro_batch_size": 8,
        "activation_checkpointing": "full:2+selective",
    },
    "some blocks, adapters": {
        **LORA,
        "activation_offload": "none",
        "activation_checkpointing": "full:3",
        "micro_batch_size": 8,
    },
    "offloaded, nf4": {**LORA, "micro_batch_size": 8, "quantization": "nf4"},
    "offloaded, int8": {**LORA, "micro_batch_size": 8, "quantization": "int8"},
    "offloaded, chunked": {**LORA, "micro_batch_size": 4, "loss": "chunked"},
    "optimizer": {"micro_batch_size": 4, "optimizer_offload": "cpu"},
    "1 sample, chunked": {"micro_batch_size": 1, "loss": "chunked"},
    "32 samples, chunked": {
        "micro_batch_size": 32,
        "loss": "chunked",
        "activation_checkpointing": "full",
    },
    "1 sample, fused": {"micro_batch_size": 1, "loss": "fused"},
    "8 samples, fused": {
        "micro_batch_size": 8,
        "loss": "fused",
        "precision": "bf16",
        "attention": "flash",
    },
    "8 samples, liger": {
        "micro_batch_size": 8,
        "kernels": "liger",
        "precision": "bf16",
        "loss": "fused",
    },
    "liger, full": {
        **LORA,
        "activation_offload": "none",
        "activation_checkpointing": "full",
        "micro_batch_size": 8,
        "kernels": "liger",
    },
}
# whether a compiler or a library is installed here says nothing of there
ELSEWHERE = replace(AMPERE, here=False)
KINDS = ("none", "alternate", "full")
COMPILED: dict[str, dict[str, Any]] = {
    f"{kind}, {way}": {"activation_checkpointing": kind, "compile": way, "micro_batch_size": 4}
    for way, kinds in (("none", KINDS), ("default", (*KINDS, "budget-0.5")))
    for kind in kinds
}


def long_of(name: str) -> tuple[Workload, Config]:
    workload = LONGER if "alternate" in name else LONG
    return workload, canonicalize({**FAR, **COMPILED}[name], workload, ELSEWHERE)


@pytest.fixture(scope="module")
def far() -> dict[str, tuple[float, float]]:
    """(bytes, seconds) of each of those configs, predicted at once."""
    figures: dict[str, tuple[float, float]] = {}
    for workload in (LONG, LONGER):
        configs = {
            name: config
            for name in (*FAR, *COMPILED)
            for of, config in [long_of(name)]
            if of is workload
        }
        rough = SpaceEstimator(workload, ELSEWHERE, UNKNOWN, list(configs.values())).predict()
        figures |= dict(zip(configs, zip(rough.allocated, rough.seconds, strict=True), strict=True))
    return figures


@pytest.mark.parametrize("name", FAR)
def test_bytes_and_seconds_of_offloading_and_of_chunks_are_those_of_a_full_trace(
    far: dict[str, tuple[float, float]], name: str
) -> None:
    full = predict(*long_of(name), ELSEWHERE, rates=UNKNOWN)
    nbytes, seconds = far[name]
    assert nbytes + workspace_bytes(ELSEWHERE) == pytest.approx(full.allocated_bytes, rel=0.05)
    # 6 %: so small a model waits for the host, and of a chunk's backward only two are counted
    assert seconds == pytest.approx(full.step_seconds, rel=0.06)


def test_chunks_of_a_model_of_few_blocks() -> None:
    workload = replace(llama_workload(8, 64, vocab_size=512), traits=None)
    configs = [
        canonicalize({"loss": "chunked", "micro_batch_size": size}, workload, CPU)
        for size in (1, 8)
    ]
    rough = SpaceEstimator(workload, CPU, UNKNOWN, configs).predict()
    full = [peak_of(traced(workload, CPU, **config), CPU).nbytes for config in configs]
    assert rough.allocated == pytest.approx(np.array(full, float), rel=0.06)


def test_flash_is_refused_where_a_mask_is_needed_and_as_fast_as_sdpa_where_none_is() -> None:
    masked = {"model_type": "mistral", "sliding_window": 16}
    for changes, fits in ((masked, False), ({}, True)):
        workload = replace(llama_workload(8, 64, num_hidden_layers=7, **changes), traits=None)
        configs = [
            canonicalize({"attention": each, "precision": "bf16"}, workload, AMPERE)
            for each in ("sdpa", "flash")
        ]
        rough = SpaceEstimator(workload, AMPERE, UNKNOWN, configs).predict()
        assert np.isfinite(rough.allocated).tolist() == [True, fits]
        assert not fits or rough.allocated[0] == rough.allocated[1]


def test_a_budget_of_recomputation_lies_between_its_ends_as_they_are_uncompiled(
    far: dict[str, tuple[float, float]],
) -> None:
    assert long_of("budget-0.5, default")[1]["activation_checkpointing"] == "budget-0.5"
    least, within, most = (
        far[name][0] for name in ("full, none", "budget-0.5, default", "none, none")
    )
    assert within == pytest.approx((least + most) / 2, rel=1e-6)


@pytest.mark.parametrize("checkpointing", KINDS)
def test_compiled_transformers_keep_as_little_as_one_estimate_alone_says(
    far: dict[str, tuple[float, float]], checkpointing: str
) -> None:
    names = [f"{checkpointing}, {way}" for way in ("none", "default")]
    eager, compiled = (predict(*long_of(name), ELSEWHERE).allocated_bytes for name in names)
    assert far[names[1]][0] - far[names[0]][0] == pytest.approx(compiled - eager, rel=0.05)
    assert (compiled < eager) is (checkpointing != "full")


def test_predictions_are_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = list(_configs(CPU, CHANGES[:2]))
    first = predict_all(WORKLOAD, CPU, configs)
    # nothing can be traced from here on
    monkeypatch.setattr(sys.modules[SpaceEstimator.__module__], "trace_skeleton", None)
    assert predict_all(WORKLOAD, CPU, configs) == first
    with pytest.raises(TypeError):
        predict_all(WORKLOAD, CPU, configs[:1])


def test_what_was_traced_for_some_configs_is_not_traced_again_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs, left = list(_configs(AMPERE, CHANGES[:3])), list[int]()
    estimator = SpaceEstimator(WORKLOAD, AMPERE, UNKNOWN, configs, notify=left.append)
    assert np.isfinite(estimator.predict(configs[2:]).seconds).all()
    assert max(left) > left[-1] == 0
    monkeypatch.setattr(sys.modules[SpaceEstimator.__module__], "trace_skeleton", None)
    again = estimator.predict([configs[2].replace(optimizer="adamw-foreach"), configs[2]])
    assert np.array_equal(again.seconds[1:], estimator.predict(configs[2:]).seconds)
    with pytest.raises(TypeError):
        estimator.predict(list(_configs(AMPERE, CHANGES[8:9])))


def test_when_the_time_for_tracing_is_over_the_rest_stays_unknown_and_nothing_is_kept(
    near: dict[str, SpacePredictions], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs, traces = list(_configs(AMPERE, CHANGES)), itertools.count()
    rushed = SpaceEstimator(WORKLOAD, AMPERE, UNKNOWN, configs, within=8.5)
    start = time.monotonic()
    # each trace takes a second
    monkeypatch.setattr(time, "monotonic", lambda: start + next(traces))
    predictions = rushed.predict()
    known = np.isfinite(predictions.allocated)
    assert not rushed.complete
    assert 0 < known.sum() < len(configs)
    assert known[0]  # what most configs need is traced first
    for figure in ("allocated", "seconds"):
        found, full = (
            getattr(each, figure)[: len(configs)][known] for each in (predictions, near["cuda"])
        )
        assert np.array_equal(found, full)
    few = configs[:2]
    assert all(np.isnan(predict_all(WORKLOAD, AMPERE, few, within=-1)[0]))
    assert all(np.isfinite(predict_all(WORKLOAD, AMPERE, few)[0]))
