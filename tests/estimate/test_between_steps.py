"""What an evaluation and a saving take, predicted without a run, and as a tracker sees them."""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from autofit.core.place import Place
from autofit.distributed.group import joined
from autofit.estimate.between_steps import EVALUATION, SAVING
from autofit.estimate.peak import peaks_between_steps, rounded
from autofit.estimate.skeleton_trace import trace_skeleton
from autofit.estimate.trace import trace
from autofit.hardware.tracker import StorageTracker
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.local_batch import LocalBatch
from autofit.training.save_model import save_model
from autofit.training.step import train_step
from tests.estimate.traced import AMPERE
from tests.ranks import on_ranks
from tests.tiny import CPU, MLP, llama_workload, mlp_workload

steps_trace = sys.modules[trace_skeleton.__module__]
LORA = {"lora_rank": 4}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16-mixed", "micro_batch_size": 1},
    {"activation_checkpointing": "full", "attention": "eager"},
    {"optimizer_in_backward": True, "optimizer": "adafactor"},
    {"optimizer": "adamw-8bit", "loss": "chunked"},
    LORA | {"lora_targets": "all-linear+head", "micro_batch_size": 2},
    LORA | {"quantization": "nf4", "precision": "bf16"},
    LORA | {"quantization": "int8", "loss": "chunked"},
)
FSDP = {"data_parallel": "fsdp", "micro_batch_size": 1}
ON_TWO: tuple[dict[str, Any], ...] = (
    FSDP,
    FSDP | {"precision": "bf16-mixed"},
    FSDP | {"reshard_after_forward": False},
    FSDP | {"optimizer_in_backward": True, "micro_batch_size": 2},
)
# bytes of the number that ranks exchanged last, which gloo keeps
LAST_EXCHANGE = 16


def predicted(config: dict[str, Any], devices: int = 1) -> dict[str, int]:
    hardware = CPU.of_several(devices)
    return peaks_between_steps(trace(llama_workload(), config, hardware), hardware)


def measured(config: dict[str, Any], directory: Path, devices: int = 1) -> dict[str, int]:
    """The same of real ones, after two steps."""
    workload = llama_workload()
    peaks = {}

    with StorageTracker() as tracker:
        setup = build(workload, config, CPU.of_several(devices))
        samples = workload.effective_batch_size // devices
        part = LocalBatch(workload.batch(samples))
        for _ in range(2):
            train_step(setup, part)
        del part

        gc.collect()
        tracker.reset_peak()
        evaluate(setup, [LocalBatch(workload.batch(samples))])
        peaks[EVALUATION] = tracker.peak

        gc.collect()
        tracker.reset_peak()
        checkpoint.save(setup, directory, 2)
        save_model(setup, directory / "model")
        peaks[SAVING] = tracker.peak
        setup.close()
    return peaks


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_peaks_between_steps_are_those_of_a_run_to_the_byte(
    config: dict[str, Any], tmp_path: Path
) -> None:
    assert predicted(config) == measured(config, tmp_path)


def measured_on_rank(directory: Path) -> list[dict[str, int]]:
    return [measured(config, directory / str(number), 2) for number, config in enumerate(ON_TWO)]


def test_of_two_ranks_the_first_gathers_the_model(tmp_path: Path) -> None:
    of_first, of_second = on_ranks(2, measured_on_rank, tmp_path)
    for config, first, second in zip(ON_TWO, of_first, of_second, strict=True):
        found = predicted(config, devices=2)
        assert 0 <= first[EVALUATION] - found[EVALUATION] <= LAST_EXCHANGE, config
        assert 0 <= first[SAVING] - found[SAVING] <= LAST_EXCHANGE, config
        assert second[SAVING] < found[SAVING]


def saved_after_a_prediction(directory: Path) -> None:
    """Each process predicts as the first rank, then is one of two."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    predicted(FSDP, devices=2)

    place = Place(rank, 2, rank, 2, f"file://{directory / 'store'}")
    with joined(place, "cpu"):
        measured(FSDP, directory / "saved", 2)


def test_a_prediction_does_not_tell_later_ranks_which_parts_are_theirs(tmp_path: Path) -> None:
    on_ranks(2, saved_after_a_prediction, tmp_path)
    assert checkpoint.exists(tmp_path / "saved")


@pytest.mark.parametrize(
    ("knobs", "gathered"),
    [
        (FSDP, 1),
        (FSDP | LORA, 1),
        (FSDP | {"fsdp_offload": "cpu"}, 0),
        ({"data_parallel": "ddp"}, 0),
    ],
    ids=["weights", "frozen weights", "on the host", "whole on each"],
)
def test_a_card_holds_one_gathered_weight_at_a_time(knobs: dict[str, Any], gathered: int) -> None:
    cards = AMPERE.of_several(2)
    traced = trace(llama_workload(8, vocab_size=8192), knobs, cards)
    resting = sum(dict(rounded(traced, cards)).values())
    largest = 8192 * 32 * 4
    saving = peaks_between_steps(traced, cards)[SAVING] - resting
    assert gathered * largest <= saving <= gathered * (largest + 32 * 128 * 4)


STREAMED = {"parameter_offload": "cpu"}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"optimizer_offload": "cpu"},
        {"quantization": "nf4"} | LORA,
        STREAMED | LORA,
        STREAMED | {"optimizer_in_backward": True},
        STREAMED | {"optimizer_offload": "cpu"},
    ],
)
def test_saving_takes_nothing_of_a_card_that_is_alone(knobs: dict[str, Any]) -> None:
    # Of five blocks with matrices that are worth streaming.
    workload = llama_workload(num_hidden_layers=5, hidden_size=256, intermediate_size=512)
    traced = trace(workload, knobs, AMPERE)
    resting = sum(dict(rounded(traced, AMPERE)).values())
    found = peaks_between_steps(traced, AMPERE)
    # What nf4 notes of itself, and a block that an evaluation before it has left there.
    streamed = "parameter_offload" in knobs
    block = 4 * (4 * 256 * 256 + 3 * 256 * 512)
    assert found[SAVING] - resting < 64 * 1024 + 2 * streamed * block
    assert found[EVALUATION] > resting


def test_a_step_is_the_same_whatever_follows() -> None:
    """What an evaluation does has no part in the step's events, costs and calls."""
    with mock.patch.object(steps_trace, "events_between_steps", lambda *_: {}):
        alone = trace(llama_workload(), {}, CPU)
    followed = trace(llama_workload(), {}, CPU)
    assert followed.between
    assert not alone.between
    for name in ("events", "marks", "collectives", "products", "costs"):
        assert getattr(alone, name) == getattr(followed, name)


def test_an_evaluation_that_cannot_be_followed_leaves_the_step_its_prediction() -> None:
    class Curious(MLP):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                raise RuntimeError("no file to compare with")
            return super().forward(*args, **kwargs)

    workload = replace(mlp_workload(), model=Curious)
    traced = trace(workload, {}, CPU)
    assert traced.between.keys() == {SAVING}
    assert traced.events == trace(mlp_workload(), {}, CPU).events
    (assumption,) = traced.assumptions
    assert assumption.startswith("what evaluation takes could not be followed (RuntimeError: no fi")
