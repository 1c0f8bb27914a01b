"""The memory of each stage of a pipeline equals that of its rank, byte for byte; and how long a schedule takes."""

import functools
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from autofit.core.layout import goes_in_rounds
from autofit.estimate.between_steps import EVALUATION, SAVING
from autofit.estimate.earlier_micro_batches import Turn
from autofit.estimate.estimator import estimate_of
from autofit.estimate.peak import peak_of
from autofit.estimate.rates import rates_for
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.estimate.stages import moments_of, order_of, seconds_of_schedule
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card, hardware_of
from autofit.hardware.tracker import StorageTracker
from autofit.techniques import canonicalize
from autofit.training.build import build
from autofit.training.step import accumulate, update
from benchmarks.predictions.ranks_memory import BATCH, STEPS, hardware, workload
from tests.ranks import on_ranks
from tests.tiny import llama_workload

PIPELINE = {"pipeline_parallel": 2, "micro_batch_size": 1}
SHARDED = PIPELINE | {"data_parallel": "fsdp"}
GPIPE = {"pipeline_schedule": "gpipe"}
INTERLEAVED = {"pipeline_schedule": "interleaved"}
FULL = {"activation_checkpointing": "full"}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        PIPELINE,
        PIPELINE | {"micro_batch_size": 4},  # all micro-batches are under way at once
        PIPELINE | FULL | {"precision": "bf16-mixed"},
        PIPELINE | {"lora_rank": 4, "quantization": "nf4", "precision": "bf16"},
        PIPELINE | GPIPE | FULL,  # most in the second backward
        PIPELINE | INTERLEAVED,
        PIPELINE | INTERLEAVED | FULL | {"precision": "bf16-mixed"},
        PIPELINE | INTERLEAVED | {"lora_rank": 4, "micro_batch_size": 2},
    ],
    4: [
        SHARDED,
        {"pipeline_parallel": 4, "micro_batch_size": 1},
        SHARDED | INTERLEAVED,
        SHARDED | INTERLEAVED | FULL | {"lora_rank": 4},
        PIPELINE | INTERLEAVED | {"data_parallel": "ddp"},
        SHARDED | FULL | {"micro_batch_size": 2},  # no forward before the second backward
    ],
}
CLOSE = 64  # bytes of numbers that ranks exchange


def peaks(world: int) -> list[int]:
    """Of each case, the most bytes of tensors on this rank."""
    return [peak(config, world) for config in CASES[world]]


def peak(config: dict[str, Any], world: int) -> int:
    """The least of the steps after the first, which makes the optimizer's state: gloo keeps inputs
    until a thread of its own is done."""
    given_here = workload()
    found = []
    with StorageTracker() as watch:
        setup = build(given_here, config, hardware(world))
        batch = given_here.batch(BATCH // setup.ranks.layout.dp_degree)
        for _ in range(STEPS):
            watch.reset_peak()
            accumulate(setup, batch)
            update(setup)
            found.append(watch.peak)
    setup.close()
    return min(found[1:])


@functools.cache
def measured(world: int) -> list[tuple[int, ...]]:
    """The peaks of all ranks, by case."""
    return list(zip(*on_ranks(world, peaks, world), strict=True))


@pytest.mark.parametrize(
    ("world", "number"), [(world, number) for world in CASES for number in range(len(CASES[world]))]
)
def test_each_stage_needs_what_is_predicted(world: int, number: int) -> None:
    traced = trace(workload(), CASES[world][number], hardware(world))
    of_stages = [peak_of(stage, hardware(world)).nbytes for stage in traced.stages]
    assert all(stage.between.keys() == {EVALUATION, SAVING} for stage in traced.stages)

    ranks_of_stage = world // len(of_stages)
    for rank, nbytes in enumerate(measured(world)[number]):
        assert of_stages[rank // ranks_of_stage] == pytest.approx(nbytes, abs=CLOSE, rel=0)


def test_few_blocks_tell_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of many blocks is followed by few of them, to the same bytes."""
    from benchmarks.predictions import ranks_memory

    deep = ranks_memory._LLAMA | {"num_hidden_layers": 48}
    monkeypatch.setattr(ranks_memory, "_LLAMA", deep)
    by_few = trace(workload(), PIPELINE, hardware(2))
    whole = trace(workload(), PIPELINE, hardware(2), whole=True)
    for few, each in zip(by_few.stages, whole.stages, strict=True):
        assert few.missing
        assert peak_of(few, hardware(2)).nbytes == peak_of(each, hardware(2)).nbytes


def test_stages_that_are_followed_at_the_same_time_need_the_same() -> None:
    alone = trace(workload(), PIPELINE, hardware(2))
    together = trace(workload(), PIPELINE, hardware(2), processes=2)
    for one, other in zip(alone.stages, together.stages, strict=True):
        assert one.whole is not None
        assert other.whole is not None
        assert one.whole.events == other.whole.events
        assert one.costs == other.costs


def test_of_streamed_blocks_each_stage_has_two_on_its_device() -> None:
    sizes = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 1024}
    given_here = llama_workload(4, 64, **sizes)
    cards = hardware_of(card("rtx-4090")).of_several(2)
    lora = {"lora_rank": 4, "lora_targets": "all-linear", "precision": "bf16"}

    def of_stages(value: str) -> list[int]:
        knobs = PIPELINE | lora | {"parameter_offload": value}
        traced = trace(given_here, canonicalize(knobs, given_here, cards), cards)
        return [peak_of(stage, cards).nbytes for stage in traced.stages]

    plain = of_stages("none")
    block = 2 * (4 * 512 * 512 + 3 * 512 * 1024)
    for value, resting in (("cpu:3", 1), ("cpu", 3)):
        saved = [before - after for before, after in zip(plain, of_stages(value), strict=True)]
        assert saved == [resting * block] * 2


def test_a_whole_space_agrees_with_traces() -> None:
    """Segments put together tell what a trace of each stage does, within a few percent."""
    cards = hardware_of(card("rtx-4090")).of_several(2)
    given_here = workload()
    changes: list[dict[str, Any]] = [{}, FULL, {"lora_rank": 4}, GPIPE, INTERLEAVED]
    changes += [{"micro_batch_size": 2}, INTERLEAVED | {"micro_batch_size": 2}]
    knobs = [PIPELINE | {"precision": "bf16"} | more for more in changes]
    configs = [canonicalize(one, given_here, cards) for one in knobs]
    rates = rates_for(cards)
    assert rates is not None
    found = SpaceEstimator(given_here, cards, rates, configs).predict()

    for config, nbytes, seconds in zip(configs, found.allocated, found.seconds, strict=True):
        traced = trace(given_here, config, cards)
        largest = max(peak_of(stage, cards).nbytes for stage in traced.stages)
        assert nbytes == pytest.approx(largest, rel=0.08)
        expected = estimate_of(traced, given_here, cards, rates=rates, calibration=None)
        assert seconds == pytest.approx(expected.step_seconds, rel=0.2)


TIMES = st.floats(0.1, 2.0)


@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(["1f1b", "gpipe", "interleaved"]),
)
def test_a_step_takes_as_long_as_its_slowest_stage_and_the_bubble(
    stages: list[tuple[float, float]], micro_batches: int, schedule: str
) -> None:
    forward, backward = zip(*stages, strict=True)
    passing = [0.0] * (len(stages) - 1)
    chunks = 1
    if schedule == "interleaved":
        chunks = 2
        assume(goes_in_rounds(micro_batches, len(stages)))

    seconds = seconds_of_schedule(forward, backward, passing, micro_batches, schedule, chunks)
    both = [sum(times) for times in stages]
    assert seconds >= micro_batches * max(both) - 1e-9
    assert seconds <= (micro_batches + len(stages) - 1) * (max(forward) + max(backward)) + 1e-9


@given(st.integers(1, 4), st.integers(1, 20), st.integers(2, 3))
def test_chunks_are_gone_through_in_the_order_of_pytorch(
    stages: int, micro_batches: int, chunks: int
) -> None:
    assume(goes_in_rounds(micro_batches, stages))
    schedule = object.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size = stages
    schedule.n_local_stages = chunks
    schedule._n_microbatches = micro_batches
    schedule.number_of_rounds = max(1, micro_batches // stages)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds

    letters = {"forward": "F", "backward": "B"}
    for stage in range(stages):
        own = order_of(stage, stages, micro_batches, "interleaved", chunks)
        written = [f"{chunk}{letters[what]}{number}" for what, chunk, number in own]
        actions = schedule._calculate_single_rank_operations(stage)
        assert written == [str(action) for action in actions if action is not None]


@given(st.integers(1, 4), st.integers(1, 9), st.data(), st.sampled_from(["1f1b", "gpipe"]))
def test_a_stage_needs_most_in_one_of_its_backwards(
    stages: int, micro_batches: int, data: st.DataObject, schedule: str
) -> None:
    """No more micro-batches hold activations than have begun and not ended, and one always runs."""
    stage = data.draw(st.integers(0, stages - 1))
    for moment in moments_of(stage, stages, micro_batches, schedule):
        assert 0 <= moment.others < moment.buffers <= micro_batches
        assert moment.others + moment.ended < micro_batches
        assert moment.turn is Turn.FIRST or moment.ended
        if schedule == "1f1b" and micro_batches >= stages:
            assert moment.others < stages - stage


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_wait_for_the_bubble_alone(schedule: str) -> None:
    seconds = seconds_of_schedule([1.0] * 4, [2.0] * 4, [0.0] * 3, 16, schedule)
    assert seconds == pytest.approx((16 + 3) * 3.0)
    passing = seconds_of_schedule([1.0] * 2, [2.0] * 2, [0.5], 1, schedule)
    assert passing == pytest.approx(6.0 + 2 * 0.5)


def test_chunks_halve_the_bubble() -> None:
    seconds = seconds_of_schedule([1.0] * 4, [2.0] * 4, [0.0] * 3, 16, "interleaved", 2)
    assert seconds == pytest.approx((16 + 3 / 2) * 3.0)
