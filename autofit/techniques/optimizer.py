"""optimizer: which implementation turns gradients into updates, and in what precision it keeps its state."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique


class Optimizer(Technique):
    """`adamw` (fused), `adamw-foreach`, `adamw-8bit` (bitsandbytes, block-wise 8-bit state), `sgd` (no state)."""

    name = "optimizer"
    stage = Stage.STEP
    off = "adamw"
    values = ("adamw", "adamw-foreach", "adamw-8bit", "sgd")
    always = True

    def exact(self, value: Value, workload: Workload) -> bool:
        return value in ("adamw", "adamw-foreach")

    def fidelity(self, value: Value) -> int:
        return {"adamw": 2, "adamw-foreach": 2, "adamw-8bit": 1, "sgd": 0}[str(value)]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == "adamw-8bit" and importlib.util.find_spec("bitsandbytes") is None:
            return "adamw-8bit needs bitsandbytes, which is not installed; pip install bitsandbytes, or use adamw."
        return None

    def memory_order(self, value: Value) -> int | None:
        """sgd keeps no state. 8-bit is not ordered: it keeps small tensors' state in fp32, which is more than the bf16
        state that adamw keeps beside bf16 weights. Nor is foreach: it adds temporaries, but holds its step counters
        on the host, where the fused adamw has one on the device for every tensor."""
        return {"sgd": 0, "adamw": 1}.get(str(value))

    def apply(self, setup: Setup, value: Value) -> None:
        hyperparameters = setup.hyperparameters
        make = _maker(str(value))
        setup.optimizer = make(parameter_groups(setup), lr=hyperparameters.lr)


def parameter_groups(setup: Setup) -> list[dict[str, Any]]:
    """Trainable parameters in groups: weight decay on matrices, none on biases and norms. Each parameter once."""
    matrices = [p for _, p in setup.trainable() if p.dim() >= 2]
    vectors = [p for _, p in setup.trainable() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": setup.hyperparameters.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _maker(value: str) -> Any:
    if value == "adamw":
        return functools.partial(torch.optim.AdamW, fused=True)
    if value == "adamw-foreach":
        return functools.partial(torch.optim.AdamW, foreach=True)
    if value == "sgd":
        return torch.optim.SGD
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit
