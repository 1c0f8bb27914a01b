"""The time of a step on several ranks: what is computed, and what is exchanged beside it or waited for."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.links import Link, Links
from autofit.distributed.collectives import Group
from autofit.estimate.ranks import group_of, step_seconds
from autofit.estimate.rates import rates_of
from autofit.estimate.roofline import Speed
from autofit.estimate.step_trace import Trace
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card
from tests.estimate.traced import AMPERE
from tests.tiny import llama_workload

# So slow a card that this small model keeps it longer than the host.
RATES = replace(
    rates_of(card("a100-80gb")), matmul={"bfloat16": 1e9, "float32": 1e9}, bandwidth=1e8
)
FREE = Links(Link("within", 1e18, 0.0), Link("between", 1e18, 0.0))
SLOW = Links(Link("within", 1e4, 0.0), Link("between", 1e3, 0.0))
FSDP = {"data_parallel": "fsdp", "precision": "bf16"}


def traced(devices: int, nodes: int = 1, **knobs: Any) -> tuple[Trace, Hardware]:
    hardware = AMPERE.of_several(devices, nodes)
    return trace(replace(llama_workload(8), traits=None), FSDP | knobs, hardware), hardware


def seconds(links: Links, devices: int = 2, nodes: int = 1, **knobs: Any) -> float:
    found, hardware = traced(devices, nodes, **knobs)
    return step_seconds(found, Speed.of(RATES, hardware, found.config), hardware, links)


def exchanged(found: Trace) -> float:
    """Seconds of what FSDP2 exchanges in the traced micro-batch over the slow link."""
    kinds = ("all_gather", "reduce_scatter")
    forward = found.start("forward")
    beside = [
        each
        for each in found.collectives
        if each.event >= forward and not each.waits and each.kind in kinds
    ]
    return sum(each.nbytes / 2 / 1e4 for each in beside)


def test_over_a_free_link_a_step_is_what_is_computed() -> None:
    found, hardware = traced(2, micro_batch_size=4)
    speed = Speed.of(RATES, hardware, found.config)
    computed = sum(
        sum(found.waits(found.spans(name), speed).values()) for name in ("forward", "backward")
    )
    assert step_seconds(found, speed, hardware, FREE) == pytest.approx(computed, rel=0.01)


def test_over_a_slow_link_a_step_is_what_is_exchanged() -> None:
    found, _ = traced(2, micro_batch_size=4)
    assert seconds(SLOW, micro_batch_size=4) == pytest.approx(exchanged(found), rel=0.05)


def test_each_micro_batch_exchanges_shards_but_adapters_wait_for_the_last() -> None:
    once, four_times = (seconds(SLOW, micro_batch_size=size) for size in (4, 1))
    assert four_times == pytest.approx(4 * once, rel=0.05)
    reduced = (
        seconds(SLOW, micro_batch_size=4, lora_rank=8),
        seconds(SLOW, micro_batch_size=1, lora_rank=8),
    )
    assert reduced[1] < 4 * reduced[0]


def test_ddp_exchanges_once_a_step() -> None:
    once, four_times = (
        seconds(SLOW, micro_batch_size=size, data_parallel="ddp") for size in (4, 1)
    )
    assert four_times == pytest.approx(once, rel=0.1)


def test_split_layers_wait_for_what_they_exchange() -> None:
    found, hardware = traced(2, tensor_parallel=2, data_parallel="none", micro_batch_size=8)
    waited = [each for each in found.collectives if each.waits]
    speed = Speed.of(RATES, hardware, found.config)
    free, slow = (step_seconds(found, speed, hardware, links) for links in (FREE, SLOW))
    of_step = [
        each for each in waited if found.start("forward") <= each.event < found.start("update")
    ]
    moved = {"all_reduce": 1.0, "all_gather": 0.5}  # of two ranks' bytes, how many pass the link
    assert slow - free == pytest.approx(
        sum(moved[each.kind] * each.nbytes for each in of_step) / 1e4, rel=0.05
    )


def test_groups_fill_nodes_first() -> None:
    eight = AMPERE.of_several(8, 2)
    assert group_of(16, 1, eight) == Group(8, 2)
    assert group_of(4, 1, eight) == Group(4)
    assert group_of(4, 4, eight) == Group(2, 2)
    assert group_of(2, 8, eight) == Group(1, 2)


def test_every_degree_has_a_group() -> None:
    """As many as `Layout.groups` says."""
    one: dict[str, Any] = {"data_parallel": None}
    for devices, knobs in (
        (1, one),
        (2, {}),
        (4, {"tensor_parallel": 2}),
        (4, {"data_parallel": "ddp"}),
    ):
        found, _ = traced(devices, **knobs)
        assert (
            len({(each.ranks, each.stride) for each in found.collectives})
            == Layout.of(found.config).groups
        )


def test_split_tokens_go_with_the_stand_in_for_flash_attn() -> None:
    """It is not installed here, and closing the trace asked for it."""
    workload, hardware = (
        replace(llama_workload(8), traits=None),
        replace(AMPERE, here=False).of_several(2),
    )
    found = trace(
        workload,
        FSDP | {"context_parallel": 2, "attention": "flash", "micro_batch_size": 4},
        hardware,
    )
    assert "all_to_all" in {each.kind for each in found.collectives}


@pytest.mark.parametrize("optimizer", ["adamw-sr", "adamw-8bit-sr", "adamw-4bit"])
def test_each_rank_holds_its_part_of_an_optimizers_state(optimizer: str) -> None:
    """Of torchao's optimizers, too, for which a trace has stand-ins."""
    elsewhere = replace(AMPERE, here=False)
    workload = replace(llama_workload(8, hidden_size=256), traits=None)

    def state(devices: int) -> int:
        hardware = elsewhere.of_several(devices)
        knobs = FSDP if devices > 1 else {"precision": "bf16"}
        found = trace(workload, knobs | {"optimizer": optimizer}, hardware)
        sizes = {event.storage: event.nbytes for event in found.events}
        return sum(sizes[each] for each, label in found.labels.items() if label == "optimizer")

    # Tables of codes are whole on each, 1 KiB for each moment.
    assert state(4) == pytest.approx(state(1) / 4, rel=0.1)
