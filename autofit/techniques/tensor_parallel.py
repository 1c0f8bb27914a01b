"""tensor_parallel: over how many devices each layer is split."""

from autofit.core.layout import degree_of, degrees
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload

_OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-8bit", "paged-adamw-8bit", "sgd", None)


class TensorParallel(Technique):
    """By the plan that transformers has for a model: heads and features of the MLP are divided, and what the devices of
    a group make of them is added up twice a block; experts stay whole. They see the same samples. null on one device.
    Nothing to apply: `data_parallel` reads it."""

    name = "tensor_parallel"
    stage = Stage.SHARD
    off = None
    takes = "a whole number that divides the devices of a node, or null"
    numbers = (1, 1_048_577)
    all_exact = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return degrees(hardware)

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """1 for a model without a plan, else what divides its heads, too."""
        traits = workload.traits
        return degrees(hardware, traits.heads if traits and traits.plan else 1 if traits else 0)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """Raises InputError for what does not divide the devices."""
        return degree_of(self.name, config, hardware)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] in (None, 1):
            return None
        if config["lora_rank"]:
            return "adapters of split layers drift apart between devices, without an error; use fsdp alone."
        if config["optimizer"] not in _OPTIMIZERS:
            return f"{config['optimizer']} was not tried on parts of layers; use adamw."
        if config["optimizer_offload"] == "cpu":
            return "optimizer_offload moves weights that are split; use fsdp_offload instead."
        if config["precision"] in ("fp8", "fp16-mixed"):
            return f"{config['precision']} was not tried on parts of layers; use bf16-mixed."
        return None
