"""fsdp_offload: keep the parts of weights, gradients and optimizer state in the host's memory."""

from autofit.core.knobs.fsdp_offload import KNOB
from autofit.core.layout import kind_of
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class FsdpOffload(Technique):
    """`cpu`: FSDP2's CPUOffloadPolicy, which copies a block to the device when it is used, and
    steps on the host. null unless `fsdp`. Nothing to apply: `data_parallel` reads it."""

    record = KNOB
    stage = Stage.SHARD
    host_values = ("cpu",)
    all_exact = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        if hardware.world == 1:
            return (None,)
        if hardware.device == "cuda":
            return ("cpu", "none")
        return ("none",)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        if kind_of(config, hardware) == "fsdp":
            return config[self.name] or "none"
        return None
