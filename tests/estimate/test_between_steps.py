"""What an evaluation and a saving take, predicted without a run, and as a tracker sees them."""

import gc
from pathlib import Path
from typing import Any

import pytest

from autofit.estimate.between_steps import EVALUATION, SAVING
from autofit.estimate.peak import peaks_between_steps
from autofit.estimate.trace import trace
from autofit.hardware.tracker import StorageTracker
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.local_batch import LocalBatch
from autofit.training.save_model import save_model
from autofit.training.step import train_step
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload

LORA = {"lora_rank": 4}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": 2},
    {"precision": "bf16"},
    {"precision": "bf16-mixed", "micro_batch_size": 1},
    {"activation_checkpointing": "full"},
    {"loss": "chunked"},
    {"attention": "eager"},
    {"optimizer_in_backward": True},
    {"optimizer": "adamw-8bit"},
    {"optimizer": "adafactor"},
    LORA,
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
# gloo keeps the number that ranks exchanged last
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
