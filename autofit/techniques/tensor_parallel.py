"""tensor_parallel: over how many devices each layer is split."""

from autofit.core.knobs.tensor_parallel import KNOB
from autofit.core.layout import degrees
from autofit.core.some_blocks import offloads
from autofit.setup import Config, Hardware, Value, Workload
from autofit.setup.technique import Degree

_OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-8bit", "paged-adamw-8bit", "sgd", None)


class TensorParallel(Degree):
    """By the plan that transformers has for a model: heads and features of the MLP are divided, and
    what the devices of a group make of them is added up twice a block; experts stay whole. They see
    the same samples. null on one device. Nothing to apply: `data_parallel` reads it."""

    record = KNOB

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """1 for a model without a plan, else what divides its heads, too."""
        traits = workload.traits
        if not traits:
            return degrees(hardware, 0)
        return degrees(hardware, traits.heads if traits.plan else 1)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] in (None, 1):
            return None

        if config.lora_rank:
            return (
                "adapters of split layers drift apart between devices, without an error; use fsdp "
                "alone."
            )
        if config.optimizer not in _OPTIMIZERS:
            return f"{config.optimizer} was not tried on parts of layers; use adamw."
        if offloads(config.optimizer_offload):
            return "optimizer_offload moves weights that are split; use fsdp_offload instead."
        if config.precision in ("fp8", "fp16-mixed"):
            return f"{config.precision} was not tried on parts of layers; use bf16-mixed."
        return None
