"""data_parallel_replicate: how many groups of devices hold all weights between them."""

from autofit.core.knobs.data_parallel_replicate import KNOB
from autofit.core.layout import dp_degree, kind_of
from autofit.setup import Config, Hardware, InputError, Value, Workload
from autofit.setup.technique import Degree


class DataParallelReplicate(Degree):
    """Under `fsdp`, more than 1 is hybrid sharding (HSDP): weights are divided inside of a group,
    and gradients are averaged between groups. `ddp` has as many as devices. null on one device.
    Nothing to apply: `data_parallel` reads it."""

    record = KNOB

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (None, *(size for size in range(2, hardware.world) if not hardware.world % size))

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """Raises InputError for a number that does not divide the devices, or is not what ddp
        has."""
        given = config[self.name]
        kind = kind_of(config, hardware)
        if hardware.world == 1:
            if given not in (None, 1):
                raise InputError(
                    f"data_parallel_replicate {given} needs several devices, and there is one."
                )
            return None

        world = dp_degree(config, hardware)
        if kind != "fsdp":
            if given not in (None, world):
                raise InputError(
                    f"with {kind} each of {world} devices is a replica, not {given}.",
                    "Leave it out.",
                )
            return world

        replicate = int(given or 1)
        if world % replicate:
            sizes = ", ".join(str(size) for size in range(1, world + 1) if not world % size)
            raise InputError(
                f"data_parallel_replicate {replicate} does not divide {world} devices.",
                f"Try {sizes}.",
            )
        return replicate
