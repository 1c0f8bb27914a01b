"""data_parallel: whether every device holds all weights (ddp), or a part that is gathered when it
is used (fsdp).

Both average gradients over ranks, which see different samples of the same effective batch.
"""

from functools import partial

from autofit.core.knobs.data_parallel import KNOB
from autofit.core.layout import Layout, kind_of
from autofit.core.some_blocks import offloads
from autofit.setup import Config, Hardware, InputError, Setup, Stage, Technique, Value, Workload
from autofit.setup.buckets import averaged_at_end, bucketed
from autofit.setup.sharding import NEW_ENOUGH, replicated, sharded


class DataParallel(Technique):
    """`ddp` is PyTorch's DistributedDataParallel, `fsdp` its FSDP2 (`fully_shard`), block by block;
    `none` where the devices see the same samples. null on one device."""

    record = KNOB
    stage = Stage.SHARD
    all_exact = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return ("fsdp", "ddp") if hardware.world > 1 else (None,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """Raises InputError where there is only one device."""
        if hardware.world > 1:
            return kind_of(config, hardware)
        if config[self.name] in ("ddp", "fsdp"):
            raise InputError(
                f"data_parallel {config[self.name]} trains on several devices, and there is one.",
                "Leave it out.",
            )
        return None

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = config[self.name]
        if value is None:
            return None

        layout = Layout.of(config)
        traits = workload.traits
        if layout.dp_degree > 1 and traits and not traits.splits:
            return (
                "this loss cannot be split, and each device would see a part of the batch; use one "
                "device."
            )

        if value == "ddp":
            return _refused_beside_replicas(config, layout)

        if value == "none" and layout.context > 1:
            return "context_parallel adds up gradients as fsdp does; use fsdp."
        if value == "none" and layout.dp_degree > 1:
            return f"without it {hardware.world} devices would all do the same; use ddp or fsdp."

        if value == "fsdp" and traits and traits.batch_norm and "mixed" in config.precision:
            return (
                "BatchNorm would get weights in 16 bits beside running statistics in 32; use bf16, "
                "fp32, or ddp."
            )
        if value == "fsdp":
            return _refused_by_shards(config)
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value != "ddp":
            sharded(setup)
        elif setup.part is not None:
            setup.when_built.append(partial(averaged_at_end, setup))
        else:
            setup.exchange.replicate = partial(replicated, setup)

    def trace(self, setup: Setup, value: Value) -> None:
        if value != "ddp":
            sharded(setup, traced=True)
        elif setup.part is not None:
            setup.when_built.append(partial(averaged_at_end, setup, traced=True))
        else:
            setup.exchange.replicate = partial(bucketed, setup)


def _refused_beside_replicas(config: Config, layout: Layout) -> str | None:
    """Why weights of this config cannot be held by every device."""
    if layout.stage_world > layout.dp_degree:
        return "ddp was not tried beside tensor_parallel or context_parallel; use fsdp."
    if config.optimizer_in_backward:
        return (
            "updates in the backward come before ddp has averaged the gradients; use fsdp, or "
            "leave them out."
        )
    if offloads(config.optimizer_offload):
        return (
            "optimizer_offload copies gradients before ddp has averaged them; use fsdp with "
            "fsdp_offload."
        )
    return None


def _refused_by_shards(config: Config) -> str | None:
    """Why weights of this config cannot be divided."""
    if config.quantization == "int8":
        return "int8 weights lose their scales when they are divided; use nf4, or ddp."
    if config.quantization != "none" and not NEW_ENOUGH:
        return (
            f"{config.quantization} weights can be divided from PyTorch 2.13 on; update it, or use "
            "ddp."
        )
    if config.optimizer == "adafactor":
        return "adafactor needs rows and columns of whole weights; use adamw, or ddp."

    for knob in ("parameter_offload", "optimizer_offload"):
        if offloads(config[knob]):
            return f"{knob} moves weights that fsdp divides; use fsdp_offload instead."
    return None
