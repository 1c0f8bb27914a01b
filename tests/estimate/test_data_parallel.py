"""The time of a step on several devices, from the trace of one."""

from dataclasses import replace

import pytest

from autofit.core.layout import Layout
from autofit.core.links import Link, Links
from autofit.estimate.data_parallel import Exchange, sharded_seconds
from autofit.estimate.rates import rates_of
from autofit.estimate.roofline import Speed
from autofit.estimate.trace import Skeleton, Trace, trace
from autofit.hardware.catalogue import card
from tests.estimate.traced import AMPERE
from tests.tiny import llama_workload

# So slow a card that this small model keeps it longer than the host.
RATES = replace(rates_of(card("a100-80gb")), matmul={"bfloat16": 1e9, "float32": 1e9}, bandwidth=1e8)
FREE = Links(Link("within", 1e18, 0.0), Link("between", 1e18, 0.0))
SLOW = Links(Link("within", 1e4, 0.0), Link("between", 1e3, 0.0))


@pytest.fixture(scope="module")
def traced() -> Trace:
    workload = replace(llama_workload(8, num_hidden_layers=6), traits=None)
    return trace(workload, {"precision": "bf16", "micro_batch_size": 4}, AMPERE)


def seconds(traced: Trace, layout: Layout, links: Links = FREE, kind: str = "fsdp", nodes: int = 1) -> float:
    hardware = AMPERE.of_several(layout.world // nodes, nodes)
    return sharded_seconds(traced, RATES, Exchange(layout, hardware, links, kind), update=1.0)


def test_whatever_is_not_exchanged_takes_as_long_as_on_one_device(traced: Trace) -> None:
    assert seconds(traced, Layout(replicate=1), kind="ddp") == pytest.approx(2 * _micro(traced) + 1.0, rel=0.01)


def _micro(traced: Trace) -> float:
    speed = Speed.of(RATES, AMPERE, traced.config)
    return sum(sum(traced.waits(traced.spans(name), speed).values()) for name in ("forward", "backward"))


def test_an_update_is_divided_among_the_shards_and_repeated_by_replicas(traced: Trace) -> None:
    two, eight = (seconds(traced, Layout(shard=shards)) for shards in (2, 8))
    assert two - eight == pytest.approx(1 / 2 - 1 / 8, rel=0.01)
    assert seconds(traced, Layout(replicate=4, shard=2)) == pytest.approx(two, rel=0.01)


def test_all_weights_are_gathered_twice_and_all_gradients_reduced_once_in_a_micro_batch(traced: Trace) -> None:
    """Over a link so slow that nothing else counts: half of the bytes are another rank's, and the ends stay whole."""
    nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in traced.shapes)
    blocks = sum(shape.numel() * dtype.itemsize for shape, dtype, block in traced.shapes if block is not None)
    exchanged = 2 * (nbytes + blocks + nbytes) / 2 / 1e4
    assert seconds(traced, Layout(shard=2), SLOW) == pytest.approx(exchanged, rel=0.05)
    assert seconds(traced, Layout(replicate=2), SLOW, "ddp") == pytest.approx(2 * 2 * nbytes / 2 / 1e4, rel=0.05)


def test_shards_of_a_node_exchange_less_with_others_than_shards_of_all(traced: Trace) -> None:
    within = seconds(traced, Layout(replicate=2, shard=2), SLOW, nodes=2)
    assert within < seconds(traced, Layout(shard=4), SLOW, nodes=2)


def test_blocks_that_stand_for_others_count_as_often() -> None:
    workload = replace(llama_workload(8, num_hidden_layers=12), traits=None)
    knobs = {"precision": "bf16", "micro_batch_size": 4}
    whole = trace(workload, knobs, AMPERE)
    short = trace(workload, knobs, AMPERE, model=Skeleton.cut_short(workload, AMPERE, alternating=False))
    for links in (FREE, SLOW):
        assert seconds(short, Layout(shard=4), links) == pytest.approx(seconds(whole, Layout(shard=4), links), rel=0.02)
