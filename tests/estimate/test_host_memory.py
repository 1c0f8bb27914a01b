"""Offloaded tensors: on fake ones all is one device, and what stands for the host's memory is told apart."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.estimate.estimator import estimate_of
from autofit.estimate.peak import host_bytes_of, peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.step_trace import Trace
from tests.estimate.traced import AMPERE, labelled, peak, traced
from tests.tiny import llama_workload

HIDDEN, VOCABULARY, BLOCKS = 256, 64, 5
_WORKLOAD = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": BLOCKS}
_BLOCK = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 512)  # bytes of a block's matrices in bf16


def _traced(**knobs: Any) -> Trace:
    return traced(llama_workload(4, 32, **_WORKLOAD), AMPERE, precision="bf16", **knobs)


def _transferred(trace: Trace, phase: str) -> int:
    return sum(cost.nbytes for cost in trace.costs_of(phase) if cost.kind == "transfer")


def test_without_offload_nothing_is_on_the_host() -> None:
    plain = _traced()
    assert (
        labelled(plain, "host")
        == host_bytes_of(plain)
        == _transferred(plain, "forward")
        == _transferred(plain, "backward")
        == 0
    )


def test_streamed_weights_are_on_the_device_two_blocks_at_a_time() -> None:
    kept, streamed = (_traced(lora_rank=4, parameter_offload=value) for value in ("none", "cpu"))
    # The weights of a block are there twice while they are put together.
    assert host_bytes_of(streamed) == (BLOCKS + 1) * _BLOCK
    saved = (
        peak_of(kept, AMPERE).parts["parameters"] - peak_of(streamed, AMPERE).parts["parameters"]
    )
    assert saved == (BLOCKS - 2) * _BLOCK
    assert _transferred(streamed, "forward") == BLOCKS * _BLOCK
    # The backward finds the last two there, but the one that it turns round at has been asked to make room.
    assert (BLOCKS - 2) * _BLOCK <= _transferred(streamed, "backward") <= BLOCKS * _BLOCK


def test_quantised_weights_are_streamed_as_they_are_held() -> None:
    pytest.importorskip("bitsandbytes")
    streamed = _traced(lora_rank=4, parameter_offload="cpu", quantization="nf4")
    assert _transferred(streamed, "forward") <= BLOCKS * _BLOCK // 4


def test_saved_activations_leave_the_device() -> None:
    workload = llama_workload(64, 64, **_WORKLOAD)
    kept, moved = (
        traced(workload, AMPERE, precision="bf16", activation_offload=value, micro_batch_size=64)
        for value in ("none", "cpu")
    )
    copied = _transferred(moved, "forward")
    assert 0 < copied <= labelled(moved, "host") < 2 * copied  # buffers are powers of two
    # All of them still fit into the window, in which they stay on the device too: not twice.
    assert peak_of(moved, AMPERE).nbytes <= peak_of(kept, AMPERE).nbytes < peak(moved)


def test_an_offloaded_optimizer_leaves_weights_and_gradients_on_the_device() -> None:
    pytest.importorskip("torchao")
    kept, moved = (_traced(optimizer_offload=value) for value in ("none", "cpu"))
    trained = sum(
        event.nbytes for event in kept.events if kept.labels.get(event.storage) == "gradients"
    )
    small = 2 * (2 * BLOCKS + 1) * HIDDEN  # norms stay: bytes of each of their tensors
    assert labelled(moved, "parameters") == labelled(kept, "parameters")
    # Weight, gradient and two moments, and a counter for each of the matrices (and of the two tables).
    assert labelled(moved, "host") == 4 * (trained - small) + 4 * (7 * BLOCKS + 2)
    assert labelled(moved, "optimizer") == 2 * small + 4 * (2 * BLOCKS + 1)
    assert _transferred(moved, "backward") == 0
    assert _transferred(moved, "update") == 2 * (trained - small)  # gradients there, weights back
    assert not any(
        cost.kind == "host" for phase in ("forward", "backward") for cost in moved.costs_of(phase)
    )


def test_gradients_of_streamed_weights_are_copied_out_and_in_again_to_be_added_to() -> None:
    pytest.importorskip("torchao")
    both, tables = (
        {"optimizer_offload": "cpu", "parameter_offload": "cpu"},
        2 * 2 * VOCABULARY * HIDDEN,
    )
    once, again = (_traced(**both, micro_batch_size=size) for size in (4, 2))
    weights, counters = BLOCKS * _BLOCK, 4 * (7 * BLOCKS + 2)
    for trace in (once, again):  # weight, gradient and two moments
        assert host_bytes_of(trace) == 4 * (weights + tables) + counters
        assert _transferred(trace, "forward") == weights
        # what is outside the blocks, and the last gradients
        assert _transferred(trace, "update") <= tables + 2 * _BLOCK
    # Gradients go out, but for those of the last two blocks, which the update waits for; weights come in.
    assert _transferred(once, "backward") == pytest.approx(2 * weights + tables, abs=4 * _BLOCK)
    more = _transferred(again, "backward") - _transferred(once, "backward")
    assert more == weights  # those of the micro-batch before


def test_the_state_on_the_host_is_there_before_the_traced_update() -> None:
    pytest.importorskip("torchao")
    names = {
        cost.name
        for cost in _traced(optimizer_offload="cpu").costs_of("update")
        if cost.kind == "host"
    }
    assert names == {"aten::_fused_adamw_"}  # and nothing that makes state


def test_an_update_on_the_host_is_waited_for_and_copies_beside_the_backward_are_not() -> None:
    pytest.importorskip("torchao")
    moved, workload = _traced(optimizer_offload="cpu"), llama_workload(4, 32, **_WORKLOAD)
    # Arithmetic that hides every copy of a backward, and no launching that copies would hide.
    slow = replace(UNKNOWN, matmul={"bfloat16": 1e9, "float32": 1e9}, launch_seconds=1e-9)
    rates = {link: replace(slow, link=link) for link in (1e9, 1e12)}
    seconds = {
        link: estimate_of(moved, workload, AMPERE, rates=rates[link], calibration=None)
        for link in rates
    }
    waited = sum(
        cost.nbytes for cost in moved.costs_of("update") if cost.kind in ("transfer", "host")
    )
    assert seconds[1e9].host_bytes == host_bytes_of(moved) > 0
    longer = seconds[1e9].step_seconds - seconds[1e12].step_seconds
    assert longer == pytest.approx(waited / 1e9, rel=0.03)


def test_paged_state_is_none_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    # What an earlier Trainer of this process asked for its own embeddings is none of this prediction's business.
    monkeypatch.setattr(
        manager, "index2config", {(0, number): {"optim_bits": 32} for number in range(99)}
    )
    plain, paged, wide = (
        _traced(optimizer=value) for value in ("adamw-8bit", "paged-adamw-8bit", "paged-adamw")
    )
    # those of at least 100,000 elements: one byte for either moment
    large = BLOCKS * 3 * HIDDEN * 512
    assert labelled(paged, "host") == 2 * large
    assert labelled(wide, "host") == 8 * large
    assert labelled(paged, "optimizer") == labelled(plain, "optimizer") - 2 * large
