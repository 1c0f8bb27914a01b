"""What is predicted of training a denoiser is what its real steps take."""

from pathlib import Path
from typing import Any

import pytest

from autofit.estimate.peak import peak_of
from autofit.estimate.trace import trace
from autofit.models import resolve
from tests.estimate.traced import tracked
from tests.models.diffusion.small import write_pipeline
from tests.tiny import CPU

WITHIN = 0.005
# of Qwen-Image, whose table of positions is no buffer: moved to a device in what is predicted, it
# is another one, and on a CPU the same
TABLE_BYTES = {"qwen": 4096 * 8 * 8}
LORA: dict[str, Any] = {"lora_rank": 4, "precision": "bf16", "micro_batch_size": 1}
ATTENTION = {"lora_targets": "attention"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sd", {"activation_checkpointing": "alternate", "optimizer": "adamw-8bit"}),
    ("sdxl", LORA | ATTENTION | {"quantization": "nf4", "activation_checkpointing": "full"}),
    ("sd3", LORA | {"activation_checkpointing": "selective"}),
    ("flux", LORA | {"optimizer": "adafactor", "activation_checkpointing": "full"}),
    ("qwen", {"precision": "bf16-mixed", "micro_batch_size": 2}),
    ("wan", LORA | {"quantization": "nf4", "optimizer": "sgd", "precision": "bf16-mixed"}),
]


WITH_TEXT_ENCODERS: list[tuple[str, dict[str, Any]]] = [
    ("sd", {"activation_checkpointing": "alternate", "micro_batch_size": 1}),
    ("sdxl", {"optimizer": "adamw-8bit", "micro_batch_size": 2}),
    ("sdxl", LORA | {"quantization": "nf4", "activation_checkpointing": "full"}),
    ("sd", LORA | {"precision": "bf16-mixed", "activation_checkpointing": "selective"}),
]


@pytest.mark.parametrize(("name", "knobs"), WITH_TEXT_ENCODERS)
def test_memory_with_text_encoders_is_that_of_real_steps(
    name: str, knobs: dict[str, Any], tmp_path: Path
) -> None:
    workload = resolve(
        str(write_pipeline(tmp_path / name, name)),
        resolution=64,
        effective_batch_size=2,
        train_text_encoders=True,
    )
    predicted = peak_of(trace(workload, knobs, CPU), CPU).nbytes
    assert predicted == pytest.approx(tracked(workload, knobs), rel=WITHIN)


@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_memory_is_that_of_real_steps(name: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / name, name)
    frames = 5 if name == "wan" else None
    workload = resolve(
        str(folder), resolution=64, frames=frames, sequence_length=12, effective_batch_size=2
    )
    predicted = peak_of(trace(workload, knobs, CPU), CPU).nbytes
    seen = tracked(workload, knobs)
    assert predicted == pytest.approx(seen, abs=TABLE_BYTES.get(name, WITHIN * seen))
