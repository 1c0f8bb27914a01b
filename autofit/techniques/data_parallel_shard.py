"""data_parallel_shard: among how many devices weights are divided; derived, so that a config is
complete."""

from autofit.core.knobs.data_parallel_shard import KNOB
from autofit.core.layout import dp_degree, kind_of
from autofit.setup import Config, Hardware, InputError, Value, Workload
from autofit.setup.technique import Degree


class DataParallelShard(Degree):
    """What the replicas leave of the devices; null on one device.

    Nothing to apply: `data_parallel` reads it.
    """

    record = KNOB

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return ()

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """Raises InputError where a given number contradicts the others."""
        kind = kind_of(config, hardware)
        devices = dp_degree(config, hardware)
        replicas = config.data_parallel_replicate or 1
        left = None
        if hardware.world > 1:
            left = devices // replicas if kind == "fsdp" else 1

        given = config[self.name]
        if given not in (None, left):
            raise InputError(
                f"data_parallel_shard {given} x data_parallel_replicate {replicas} is not the "
                f"number of devices, {devices}.",
                "Leave it out: it is derived.",
            )
        return left
