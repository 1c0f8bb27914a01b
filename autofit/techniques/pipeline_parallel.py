"""pipeline_parallel: over how many devices the blocks of a model are divided, one after the other."""

from autofit.core.errors import pluralize
from autofit.core.knobs.pipeline_parallel import KNOB
from autofit.core.layout import Layout
from autofit.setup import Config, Hardware, Setup, Value, Workload
from autofit.setup.technique import Degree

_FEW = 4  # devices, among which stages are searched without being asked for
_BYTES_IN_4_BITS = 0.55  # of a weight, with its scales
_MOST_OF_DEVICE = 0.6  # for weights; the rest is for what training needs beside them


class PipelineParallel(Degree):
    """Each stage holds some blocks, and passes on one activation a micro-batch; the stages see the
    same samples. null on one device. Nothing to apply: a model is cut before it has weights."""

    record = KNOB

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        """Every divisor of the devices, also those of several nodes."""
        if hardware.world == 1:
            return (None,)
        world = hardware.world
        return tuple(size for size in range(1, world + 1) if world % size == 0)

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """All of a few devices that hold no whole model in 4 bits; else 1, unless it is asked for.

        Where each device holds the model, replicas exchange less, and a search has enough to do.
        """
        choices = self.choices(hardware)
        traits = workload.traits
        if hardware.world > _FEW or traits is None or _refused_model(workload):
            return choices[:1]

        weights = traits.parameters * _BYTES_IN_4_BITS
        is_large = weights > _MOST_OF_DEVICE * hardware.memory_bytes
        return choices if is_large else choices[:1]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        stages = Layout.of(config).pipeline
        if stages == 1:
            return None

        traits = workload.traits
        if traits and traits.blocks < stages:
            blocks = pluralize(traits.blocks, "repeated block")
            return f"the model has {blocks}, fewer than {stages} stages; use data_parallel: fsdp."

        if traits and not traits.splits:
            return (
                "this loss cannot be split, and stages would wait for one another; use "
                "data_parallel: fsdp."
            )
        return _refused_model(workload) or _refused_beside(config)

    def apply(self, setup: Setup, value: Value) -> None:
        """Do nothing: `build` cuts the model."""


def _refused_model(workload: Workload) -> str | None:
    """Why a model or its loss cannot be cut."""
    traits = workload.traits
    if traits and traits.batch_norm:
        return "BatchNorm before the blocks would see batches twice; use data_parallel: fsdp."
    if workload.frozen:
        return "a loss that asks other models was not tried in stages; use data_parallel: fsdp."
    if hasattr(workload.loss, "over_batch") or hasattr(workload.loss, "represent"):
        return (
            "a loss that asks something of a whole batch was not tried in stages; use "
            "data_parallel: fsdp."
        )
    return None


def _refused_beside(config: Config) -> str | None:
    """Why other knobs cannot be beside stages."""
    layout = Layout.of(config)
    if layout.tensor > 1 or layout.context > 1:
        return "stages were not tried beside split layers or tokens; use tensor_parallel 1."
    if config.head_only or config.lora_targets == "head":
        return "only the last stage has a head, and the others nothing to train; use ddp."
    if config.optimizer_in_backward:
        return "a pipeline needs several micro-batches, and each backward would take a step."
    if config.precision == "fp16-mixed":
        return "stages would skip other steps than one another; use bf16-mixed."
    return None
