"""reshard_after_forward: whether gathered weights are given up between forward and backward."""

from autofit.core.knobs.reshard_after_forward import KNOB
from autofit.core.layout import Layout, kind_of
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class ReshardAfterForward(Technique):
    """`true` gathers weights twice a micro-batch (ZeRO-3), `false` keeps them from forward to
    backward (ZeRO-2); a number: given up to groups of so many devices. null unless `fsdp`. Nothing
    to apply: `data_parallel` reads it."""

    record = KNOB
    stage = Stage.SHARD
    all_exact = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return self.values if hardware.world > 1 else (None,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        if kind_of(config, hardware) != "fsdp":
            return None
        return True if config[self.name] is None else config[self.name]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = config[self.name]
        layout = Layout.of(config)
        shard = layout.shard * layout.context
        if type(value) is int and (shard % value or value == shard):
            return (
                f"{value} is no smaller part of {shard} shards; use true, false, or a number that "
                "divides them."
            )
        return None
