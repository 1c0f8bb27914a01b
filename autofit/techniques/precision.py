"""precision: the number formats of weights, gradients, optimizer state and arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique

_FIDELITY = {"fp32": 3, "bf16-mixed": 2, "fp16-mixed": 1, "bf16": 0}
_AMPERE = (8, 0)  # first compute capability with bf16 matrix units


class Precision(Technique):
    """The four ways of holding and computing numbers.

    `fp32`: everything. `bf16`: weights, gradients, optimizer state and arithmetic. `bf16-mixed`, `fp16-mixed`: trained
    weights, their gradients and state in fp32; frozen weights and arithmetic (autocast) in the low format.
    """

    name = "precision"
    stage = Stage.WEIGHTS
    off = "fp32"
    values = ("fp32", "bf16", "bf16-mixed", "fp16-mixed")
    always = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        if hardware.device == "cpu":
            # CPUs have no fp16 arithmetic: a matmul was measured 38 times slower than fp32. Allowed, not searched.
            return ("fp32", "bf16", "bf16-mixed")
        if hardware.capability and hardware.capability < _AMPERE:
            return ("fp32", "fp16-mixed")
        return self.values

    def fidelity(self, value: Value) -> int:
        return _FIDELITY[str(value)]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        low = str(config[self.name]).startswith("bf16")
        if low and hardware.device == "cuda" and hardware.capability and hardware.capability < _AMPERE:
            capability = ".".join(str(part) for part in hardware.capability)
            return f"bf16 needs compute capability 8.0, {hardware.name} has {capability}; use fp16-mixed or fp32."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value == "bf16":
            setup.trainable_dtype = setup.frozen_dtype = torch.bfloat16
            _cast_inputs(setup, torch.bfloat16)
            if not setup.config.get("lora_rank"):
                setup.warnings.append(
                    "bf16 weights lose updates smaller than 1/256 of the weight; bf16-mixed keeps them."
                )
            return
        setup.trainable_dtype = setup.frozen_dtype = torch.float32
        low = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(str(value))
        given = {parameter.dtype for parameter in setup.model.parameters() if parameter.is_floating_point()}
        if low and _some_stay_frozen(setup):  # a frozen norm is held in the low format, and cannot take fp32 features
            _cast_inputs(setup, low)
        elif given - {torch.float32}:  # a model made in another format comes with inputs in it
            _cast_inputs(setup, torch.float32)
        if torch.float64 in given:
            setup.warnings.append("the model's float64 weights are held and trained in float32.")
        if low:
            setup.frozen_dtype = low
            device = setup.device.type
            setup.forward_contexts.append(lambda: torch.autocast(device, dtype=low))
            if value == "fp16-mixed":
                setup.scaler = torch.amp.GradScaler(device)


def _some_stay_frozen(setup: Setup) -> bool:
    return bool(setup.config.get("lora_rank")) or any(not p.requires_grad for p in setup.model.parameters())


def _cast_inputs(setup: Setup, dtype: torch.dtype) -> None:
    """Floating inputs (images, features) follow the weights' dtype when they enter the model; labels outside do not."""

    def cast(_: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def to(value: torch.Tensor) -> torch.Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return tree_map_only(torch.Tensor, to, (args, kwargs))  # type: ignore[no-any-return]

    handle = setup.model.register_forward_pre_hook(cast, with_kwargs=True)
    setup.on_close(handle.remove)
