"""What an out-of-memory proves: the proven orders, held against tracked bytes.

A value that ranks higher may never need less than one that ranks lower, all other knobs equal and both on the same
side of accumulation = 1. The search excludes configs by this, so an order that fails here must go.
"""

import itertools
import operator
from functools import cache

import bitsandbytes  # noqa: F401 - what libraries allocate when they are imported is no part of a comparison
import peft  # noqa: F401
import pytest

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.workload import Workload
from autofit.data.batch import map_tensors
from autofit.hardware.tracker import StorageTracker
from autofit.techniques import all_techniques, canonicalize, technique_named
from autofit.training.build import build
from autofit.training.step import accumulate, update
from tests import tiny

WORKLOADS: dict[str, Workload] = {
    "llama": tiny.llama_workload(4),
    "tied llama": tiny.llama_workload(4, tie_word_embeddings=True, num_key_value_heads=1),
    "transformer": tiny.transformer_workload(4),
    "convolutions": tiny.conv_workload(4),
    "mlp": tiny.mlp_workload(4),
}
VALUES: dict[str, tuple[Value, ...]] = {"micro_batch_size": (1, 2, 4), "lora_rank": (4, 8, 64)}
# The other knobs, in every way they were seen to interact: what is frozen, what holds state, what is kept for backward.
BASES: tuple[dict[str, Value], ...] = (
    {},
    {"precision": "bf16", "activation_checkpointing": "full", "micro_batch_size": 1},
    {"precision": "bf16-mixed", "optimizer": "adamw-8bit", "micro_batch_size": 2},
    {"lora_rank": 4, "lora_targets": "attention", "optimizer": "sgd", "micro_batch_size": 2},
    {"lora_rank": 8, "precision": "bf16-mixed", "attention": "eager", "micro_batch_size": 1},
    {"lora_rank": 8, "optimizer": "adamw-8bit", "activation_checkpointing": "full"},
    {"lora_rank": 8, "lora_targets": "all-linear+head", "precision": "bf16", "attention": "eager"},
    {"precision": "bf16-mixed", "attention": "eager", "optimizer": "sgd"},
    {
        "optimizer": "adamw-foreach",
        "activation_checkpointing": "full",
        "attention": "eager",
        "micro_batch_size": 2,
    },
)


def ordered(knob: str) -> list[Value]:
    """The values that have a rank, lowest first."""
    technique = technique_named(knob)
    values = [
        value
        for value in technique.values or VALUES.get(knob, ())
        if technique.memory_order(value) is not None
    ]
    return sorted(values, key=technique.memory_order)


KNOBS = [technique.name for technique in all_techniques() if len(ordered(technique.name)) > 1]


@cache
def peak_bytes(name: str, config: Config) -> int:
    """The tracked peak of building and of two optimizer steps, as a probe measures it."""
    workload = WORKLOADS[name]
    with StorageTracker() as tracker:
        setup = build(workload, config, tiny.CPU)
        batch = workload.batch(workload.effective_batch_size)
        # state exists from the second step on
        for samples in (setup.micro_batch_size, 2 * setup.micro_batch_size):
            accumulate(setup, map_tensors(batch, operator.itemgetter(slice(samples))))
            assert update(setup)
    return tracker.peak


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("knob", KNOBS)
def test_what_ranks_higher_never_needs_less(knob: str, name: str) -> None:
    compared = 0
    for base in BASES:
        runs = [
            canonicalize({**base, knob: value}, WORKLOADS[name], tiny.CPU)
            for value in ordered(knob)
        ]
        for low, high in itertools.combinations(runs, 2):
            alike = (low["gradient_accumulation_steps"] == 1) == (
                high["gradient_accumulation_steps"] == 1
            )
            if low == high or not alike:
                continue
            try:
                less, more = peak_bytes(name, low), peak_bytes(name, high)
            except RefusedError:  # no attention layers to put adapters beside
                continue
            assert less <= more, f"{less - more} bytes more at {low} than at {high}"
            compared += 1
    assert compared or (name, knob) == ("convolutions", "lora_targets")


def test_the_orders_are_the_ones_that_were_held_against_tracked_bytes() -> None:
    assert {knob: ordered(knob) for knob in KNOBS} == {
        "activation_checkpointing": ["full", "none"],
        "lora_targets": ["attention", "all-linear", "all-linear+head"],
        "micro_batch_size": [1, 2, 4],
        "optimizer": ["sgd", "adamw"],
    }


def test_a_higher_rank_can_need_less_beside_an_8_bit_optimizer() -> None:
    """Why lora_rank has no order: tensors of fewer than 4096 elements keep their state in fp32."""
    peaks = [
        peak_bytes(
            "mlp",
            canonicalize(
                {"lora_rank": rank, "optimizer": "adamw-8bit"}, WORKLOADS["mlp"], tiny.CPU
            ),
        )
        for rank in (85, 86)  # beside 48 features: 4080 and 4128 elements
    ]
    assert peaks[1] < 0.9 * peaks[0]
