"""A script emitted for a tiny model, with any knob or task changed."""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch

from autofit.core.config import Config
from autofit.export.script import train_script
from tests.export.architectures import ARCHITECTURES

OFF = {
    "precision": "fp32",
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "activation_checkpointing": "none",
    "lora_rank": 0,
    "lora_targets": None,
    "optimizer": "adamw",
    "attention": "sdpa",
}
VERSIONS = {name: version(name).partition("+")[0] for name in ("torch", "transformers", "peft")}
MEASURED = {
    "tokens_per_second": 5120.3,
    "samples_per_second": 2.5,
    "step_seconds": {"median": 12.8, "low": 12.7, "high": 12.9},
    "peak_gib": {"allocated": 20.1, "reserved": 21.0, "device": 21.6},
    "verified": True,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads, by far so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def architectures() -> dict[str, dict[str, Any]]:
    """A tiny transformers config for every task, and GPT-2, whose layers are transposed and whose head is tied."""
    return ARCHITECTURES


@pytest.fixture(scope="session")
def emit() -> Callable[..., str]:
    """The emitted script for a task and knobs; `others` are arguments of train_script."""

    def emitted(task: str = "causal-lm", others: dict[str, Any] | None = None, **knobs: Any) -> str:
        arguments: dict[str, Any] = {
            "model": "tiny",
            "workload": {"task": task, "sequence_length": 64, "effective_batch_size": 8},
            "source": {"kind": "preset", "model": "tiny"},
            "model_config": ARCHITECTURES[task],
            "config": Config({**OFF, **knobs}),
            "measured": MEASURED,
            "versions": {"autofit": "0.1.0", **VERSIONS},
            "hardware": {"device": "cpu", "name": "a test's CPU", "budget_gib": 2.0},
        }
        script = train_script(**{**arguments, **(others or {})})
        assert script is not None
        return script

    return emitted
