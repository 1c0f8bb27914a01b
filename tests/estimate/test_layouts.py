"""A few layouts are traced, and tell of all: predictions of a space against traces of its configs one by one."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.workload import Workload
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.estimator import predict
from autofit.estimate.figures import predict_all
from autofit.estimate.layouts import have_few_shards, standing_for
from autofit.estimate.peak import peak_of
from autofit.estimate.ranks import step_seconds
from autofit.estimate.rates import rates_of
from autofit.estimate.roofline import Speed
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card, links_of
from autofit.techniques import canonicalize
from tests.estimate.traced import AMPERE
from tests.tiny import CPU, llama_workload

RATES = rates_of(card("a100-80gb"))
FSDP = {"data_parallel": "fsdp"}


def workload(**changes: Any) -> Workload:
    # Embedding and head are larger than a block, and gathered by themselves.
    sizes = {
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 640,
    }
    return dataclasses.replace(llama_workload(**sizes, **changes), effective_batch_size=64)


@given(st.sampled_from([2, 4, 8, 64, 1024]), st.data())
def test_every_layout_is_traced_by_legal_ones_whose_shares_are_one(
    world: int, draw: st.DataObject
) -> None:
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    tensor = draw.draw(st.sampled_from(divisors))
    context = draw.draw(
        st.sampled_from([size for size in divisors if world % (size * tensor) == 0])
    )
    dp_degree = world // tensor // context
    replicate = draw.draw(st.sampled_from([size for size in divisors if dp_degree % size == 0]))
    degrees = {
        "tensor_parallel": tensor,
        "context_parallel": context,
        "data_parallel_replicate": replicate,
    }
    hardware = AMPERE.of_several(world)
    given = dataclasses.replace(workload(), effective_batch_size=world)
    config = canonicalize(FSDP | degrees, given, hardware)
    standing = standing_for(config, hardware)
    assert sum(share for _, share in standing) == pytest.approx(1.0)
    for each, share in standing:
        layout = Layout.of(each)
        assert 0.0 <= share <= 1.0
        assert (layout.context, layout.tensor) == (context, tensor)
        assert 1 < layout.world <= world
    shares = [(1 / Layout.of(each).shard, share) for each, share in standing]
    if dp_degree > replicate:  # a share of the weights that is in between stays what it was
        assert sum(part * share for part, share in shares) == pytest.approx(replicate / dp_degree)


def test_few_numbers_of_shards_are_traced_as_they_are() -> None:
    eight = AMPERE.of_several(8)
    two, four = (
        canonicalize(FSDP | {"data_parallel_replicate": size}, workload(), eight) for size in (2, 4)
    )
    split = canonicalize(FSDP | {"tensor_parallel": 4}, workload(), eight)
    whole = canonicalize(FSDP, workload(), eight)
    assert have_few_shards([two, four, split])
    assert not have_few_shards([two, four, whole])
    ((traced, share),) = standing_for(two, eight, few=True)
    assert (Layout.of(traced), share) == (Layout(1, 4), 1.0)
    assert len(standing_for(two, eight)) == 2


def test_one_device_is_traced_as_it_is() -> None:
    config = canonicalize({}, workload(), AMPERE)
    assert standing_for(config, AMPERE) == [(config, 1.0)]


CASES: dict[str, dict[str, Any]] = {
    "fsdp": FSDP | {"micro_batch_size": 2},
    "kept": FSDP | {"micro_batch_size": 4, "reshard_after_forward": False},
    "ddp": {"data_parallel": "ddp", "micro_batch_size": 2},
    "chunked": FSDP | {"micro_batch_size": 2, "loss": "chunked"},
    "tensor": FSDP | {"tensor_parallel": 2, "micro_batch_size": 4},
    "context": FSDP | {"context_parallel": 2, "micro_batch_size": 4},
    "qlora": FSDP
    | {
        "micro_batch_size": 2,
        "lora_rank": 16,
        "data_parallel_replicate": 2,
        "precision": "bf16",
        "quantization": "nf4-dq",
        "activation_checkpointing": "full",
    },
}


@pytest.fixture(scope="module")
def eight() -> Hardware:
    return CPU.of_several(8)


def test_a_space_is_predicted_as_its_configs_one_by_one(eight: Hardware) -> None:
    given = workload()
    configs = [canonicalize(knobs, given, eight) for knobs in CASES.values()]
    predicted = SpaceEstimator(given, eight, RATES, configs).predict()
    for name, config, nbytes, seconds in zip(
        CASES, configs, predicted.allocated, predicted.seconds, strict=True
    ):
        traced = trace(given, config, eight)
        # Of the rank's few rows of an adapter each of eight ranks has a whole number, each of four may have another.
        close = 0.01 if config["lora_rank"] else 0.002
        assert nbytes == pytest.approx(peak_of(traced, eight).nbytes, rel=close), name
        speed = Speed.of(RATES, eight, config)
        # A space takes the scales of nf4-dq to be as quick as those of nf4: six launches less for each weight.
        least = 0.85 if config["quantization"] == "nf4-dq" else 0.9
        assert seconds > least * step_seconds(traced, speed, eight, links_of(eight)), name


@pytest.mark.parametrize(
    "knobs", [{}, {"fsdp_offload": "cpu"}, {"lora_rank": 16, "precision": "bf16-mixed"}]
)
def test_on_cards_too(knobs: dict[str, Any]) -> None:
    """What is on the host, the device does not hold; and what exchanges are beside is the same."""
    two, size = AMPERE.of_several(2), 8
    given = replace(
        llama_workload(7, hidden_size=256, intermediate_size=1024, vocab_size=8192),
        effective_batch_size=64,
    )
    config = canonicalize(FSDP | {"micro_batch_size": size} | knobs, given, two)
    estimate = predict(given, config, two, rates=RATES)
    (nbytes,), (seconds,) = predict_all(given, two, [config])
    assert (nbytes, seconds) == (
        pytest.approx(estimate.allocated_bytes, rel=0.02),
        # Where gradients are added up on the host, a space takes all of that to be waited for.
        pytest.approx(estimate.step_seconds, rel=0.15 if "fsdp_offload" in knobs else 0.1),
    )


def test_figures_hold_what_libraries_take_on_each_device() -> None:
    eight = AMPERE.of_several(8)
    config = canonicalize(CASES["ddp"], workload(), eight)
    (nbytes,), (seconds,) = predict_all(workload(), eight, [config])
    (found,) = SpaceEstimator(workload(), eight, RATES, [config]).predict().allocated
    assert nbytes == found + workspace_bytes(eight)
    assert seconds > 0
