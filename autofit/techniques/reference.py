"""reference: where the answers of the model before training come from, which preference losses
compare with.

All three ways give the same loss, up to rounding: adapters begin without effect, so that the model
without them is what it was.
"""

from functools import partial

from autofit.core.knobs.reference import KNOB
from autofit.core.workload import REFERENCE
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.setup.streamed_blocks import LEAST_BLOCKS, SMALLEST
from autofit.setup.streamed_models import TOO_FEW, stream_blocks
from autofit.setup.without_adapters import without_adapters


class Reference(Technique):
    """`resident`: a frozen copy of the model, in the format of frozen weights. `offloaded`: its
    blocks rest in host memory, and come to the device one after the other. `adapter-off`: the
    model itself with its adapters off, at no memory. `precomputed`: the batches hold what it says of
    each sample, found in one pass over the data before training. null where the loss asks no such
    model."""

    record = KNOB
    # before weights exist: building needs no more memory than running
    stage = Stage.ADAPT
    all_exact = True

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        if not asks_for_copy(workload):
            return (None,)
        found = ["resident", "adapter-off"]
        if hardware.device == "cuda":
            found.append("offloaded")
        if workload.precomputes:
            found.append("precomputed")
        return tuple(found)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        return config[self.name] or ("resident" if asks_for_copy(workload) else None)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = config[self.name]
        if value is None:
            return None

        if not asks_for_copy(workload):
            return "the loss does not ask the model before training; leave reference out."

        if value == "adapter-off":
            if not config.lora_rank:
                return (
                    "all weights are trained, and there is no model without adapters; use resident."
                )
            if config.lora_dora:
                return "adapters of DoRA were not tried switched off; use precomputed."

        if value == "precomputed" and not workload.precomputes:
            return (
                "the batches do not hold what the reference says of each sample (a tensor "
                f'"{REFERENCE}"); use resident, or adapter-off with lora_rank.'
            )

        if value == "resident":
            return _refused_copy(config)
        if value == "offloaded":
            return _refused_copy(config) or _refused_streaming(config, workload, hardware)
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value == "adapter-off":
            setup.stand_ins[REFERENCE] = partial(without_adapters, setup)
        if value == "offloaded":
            _stream(setup, CopyLane.of(setup.device))

    def trace(self, setup: Setup, value: Value) -> None:
        if value == "offloaded":
            _stream(setup, CopyLane(None, setup.tracing.note_host))
        else:
            self.apply(setup, value)


def asks_for_copy(workload: Workload) -> bool:
    """Whether the loss asks the model as it is before training."""
    return REFERENCE in workload.frozen and workload.frozen[REFERENCE] is None


def _stream(setup: Setup, lane: CopyLane) -> None:
    """Let the copy's blocks rest on the host. It ends with the setup: none comes back."""
    copied = setup.frozen[REFERENCE]
    stream_blocks(
        setup,
        copied,
        repeated_blocks(copied),
        lane,
        smallest=SMALLEST,
        instead="resident",
    )


def _refused_streaming(config: Config, workload: Workload, hardware: Hardware) -> str | None:
    """Why a copy's blocks cannot rest on the host."""
    if hardware.device == "cpu":
        return (
            "on a CPU, device and host share one memory, so nothing would be saved; use resident."
        )
    if config.data_parallel == "fsdp":
        return "FSDP divides the copy's blocks itself; use resident, or precomputed."
    if workload.traits and workload.traits.blocks < LEAST_BLOCKS:
        return TOO_FEW.format("resident")
    return None


def _refused_copy(config: Config) -> str | None:
    """Why a copy of the model cannot stay beside it."""
    if config.quantization != "none":
        return "the copy would be larger than the quantised model; use adapter-off."
    if config.tensor_parallel not in (None, 1) or config.context_parallel not in (None, 1):
        return (
            "a copy of the model was not tried beside tensor_parallel or context_parallel; use "
            "precomputed, or data_parallel alone."
        )
    return None
