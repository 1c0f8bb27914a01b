"""attention: how softmax(QK)V is computed."""

from __future__ import annotations

from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique


class Attention(Technique):
    """`sdpa`: the framework's choice. `eager`: plain matrix products, which hold the whole score matrix."""

    name = "attention"
    stage = Stage.BLOCKS
    off = "sdpa"
    values = ("sdpa", "eager")

    def settle(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        uses_it = workload.traits is None or workload.traits.sdpa
        return config[self.name] if uses_it else self.off

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def apply(self, setup: Setup, value: Value) -> None:
        model: Any = setup.model
        if not hasattr(model, "set_attn_implementation"):
            # Around forward and backward: a checkpointed block must take the same path when it is computed again.
            setup.step_contexts.append(lambda: sdpa_kernel(SDPBackend.MATH))
            return
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation(str(value))
        except (ValueError, ImportError) as error:
            raise RefusedError(f"this model has no {value} attention: {error}") from error
        setup.on_close(lambda: model.set_attn_implementation(before))
