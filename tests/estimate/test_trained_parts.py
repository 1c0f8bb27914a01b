"""Models of which parts are frozen while the rest is trained: predicted to the byte."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.workload import Workload
from autofit.estimate.estimator import predict
from autofit.estimate.figures import predict_all
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.shallow_model import Cut
from autofit.estimate.skeleton import Skeleton
from autofit.models.huggingface import huggingface_workload
from autofit.techniques import canonicalize
from tests import tiny
from tests.estimate.traced import AMPERE, labelled, peak, traced, tracked
from tests.tiny import CPU

HEAD = ("model.norm", "lm_head")
LAST = ("model.layers.4", "model.layers.5", *HEAD)
FOURTH = ("model.layers.3", *HEAD)
MIDDLE = ("model.layers.2.mlp",)
FIRST = ("model.embed_tokens",)
KNOBS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2},
    {"activation_checkpointing": "full"},
    {"precision": "bf16-mixed", "activation_checkpointing": "selective"},
    {"precision": "bf16", "optimizer": "sgd", "micro_batch_size": 2},
    {"optimizer_in_backward": True},
]


def workload(parts: tuple[str, ...], *, asks_inputs: bool = False, depth: int = 6) -> Workload:
    model = tiny.llama(num_hidden_layers=depth, hidden_size=64, vocab_size=64)
    model = replace(model, parts=parts, asks_inputs=asks_inputs)
    made = huggingface_workload(model, sequence_length=32, effective_batch_size=8)
    return replace(made, traits=None)


@pytest.mark.parametrize(
    ("parts", "asks_inputs", "knobs"),
    [
        *((FOURTH, False, knobs) for knobs in KNOBS),
        # how the weights of the middle and of the first layer are stepped is the same
        *((MIDDLE, False, knobs) for knobs in KNOBS[1:4]),
        *((FIRST, False, knobs) for knobs in KNOBS[:3]),
        # gradients of the inputs change what blocks save, which checkpointing decides
        *((FOURTH, True, knobs) for knobs in KNOBS[2:4]),
        (MIDDLE, True, KNOBS[2]),
        (FIRST, True, {}),
    ],
    ids=str,
)
def test_bytes_are_those_of_real_steps(
    parts: tuple[str, ...], asks_inputs: bool, knobs: dict[str, Any]
) -> None:
    made = workload(parts, asks_inputs=asks_inputs, depth=4)
    measured = tracked(made, knobs)
    assert peak(traced(made, **knobs)) == measured
    (nbytes,), _ = predict_all(made, CPU, [canonicalize(knobs, made, CPU)], measuring=0)
    assert nbytes == pytest.approx(measured, rel=0.01)


def test_only_what_is_trained_has_gradients_and_state() -> None:
    parts = traced(workload(LAST))
    whole = traced(workload(()))
    share = labelled(parts, "gradients") / labelled(whole, "gradients")
    of_state = labelled(parts, "optimizer") / labelled(whole, "optimizer")
    assert of_state == pytest.approx(share, rel=1e-3)
    assert 0.3 < share < 0.4  # two of six blocks, and the head
    assert labelled(parts, "parameters") == labelled(whole, "parameters")


def test_blocks_below_the_first_that_is_trained_save_nothing() -> None:
    last = peak(traced(workload(("model.layers.5",))))
    first = peak(traced(workload(("model.layers.0",))))
    assert first > 1.5 * last  # as many weights are trained


@pytest.mark.parametrize("knobs", [{}, {"activation_checkpointing": "full"}], ids=str)
def test_frozen_blocks_that_are_never_checkpointed_save_all(knobs: dict[str, Any]) -> None:
    made = workload(("model.layers.1", "model.layers.4"))
    spared = replace(made, model=replace(made.model, spares_frozen=True))  # type: ignore[type-var]
    assert peak(traced(spared, **knobs)) == tracked(spared, knobs)
    more = peak(traced(spared, **knobs)) - peak(traced(made, **knobs))
    assert more > 0 if knobs else more == 0


def test_blocks_of_which_some_are_trained_do_not_stand_for_each_other() -> None:
    whole = Skeleton.cut_short(workload((), depth=12), CPU, Cut())
    assert whole.depth is not None
    alike = Skeleton.cut_short(workload(("lm_head",), depth=12), CPU, Cut())
    assert alike.depth == whole.depth
    ends = tuple(f"model.layers.{block}" for block in (3, 4, 9))
    assert Skeleton.cut_short(workload(ends, depth=12), CPU, Cut()).depth is None


def test_a_step_takes_the_time_of_what_is_trained() -> None:
    def seconds(parts: tuple[str, ...], *, asks_inputs: bool = False) -> float:
        made = workload(parts, asks_inputs=asks_inputs, depth=8)
        found = predict(made, {}, AMPERE, rates=UNKNOWN).step_seconds
        assert found is not None
        return found

    last = seconds(("model.layers.7",))
    assert last < 0.6 * seconds(())
    assert last < 0.8 * seconds(("model.layers.7",), asks_inputs=True)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "paged-adamw-8bit"])
def test_divided_weights_have_parts_of_what_is_trained(optimizer: str) -> None:
    knobs = {"data_parallel": "fsdp", "precision": "bf16-mixed", "optimizer": optimizer}
    held = {
        parts: labelled(traced(workload(parts), AMPERE.of_several(2), **knobs), "optimizer")
        for parts in ((), LAST)
    }
    assert 0 < held[LAST] < 0.45 * held[()]
