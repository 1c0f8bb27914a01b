"""activation_offload: what the forward saves for the backward waits in host memory."""

from autofit.core.knobs.activation_offload import KNOB
from autofit.core.some_blocks import SomeBlocks
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.setup.saved_tensors import SavedTensorsOnHost


class ActivationOffload(Technique):
    """`cpu`: saved tensors of 1 MiB and more move to pinned host buffers and back, overlapped with
    computation. `cpu:12`: what the first twelve blocks save, whose backward comes last.

    Beside activation_checkpointing those are the inputs of the blocks. Tensors that autograd does
    not save stay: what `selective` checkpointing keeps, and the inputs that bitsandbytes' int8
    layers hold themselves. torch.autograd.graph.save_on_cpu instead allocates a buffer per tensor,
    copies on the computing stream (nothing overlaps), and moves weights as well.
    """

    record = KNOB
    stage = Stage.BLOCKS
    cuda_values = host_values = ("cpu",)
    all_exact = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """`none` where no gradient reaches a block; one word where all blocks are alike."""
        return self.off if config.head_only else self.in_one_word(config, workload)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] != self.off and hardware.device == "cpu":
            return (
                "on a CPU, device and host share one memory, so nothing would be saved; use none, "
                "or activation_checkpointing."
            )
        if SomeBlocks.of(config[self.name]) and workload.traits and not workload.traits.blocks:
            return "the model has no repeated blocks to count; use cpu."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        _offload(setup, value, CopyLane.of(setup.device))

    def trace(self, setup: Setup, value: Value) -> None:
        _offload(setup, value, CopyLane(None, setup.tracing.note_host))


def _offload(setup: Setup, value: Value, lane: CopyLane) -> None:
    saved = SavedTensorsOnHost(setup.model, lane)
    some = SomeBlocks.of(value)
    if some:
        for block in repeated_blocks(setup.model)[: some.number]:
            for handle in saved.inside(block):
                setup.on_close(handle.remove)

    setup.forward_contexts.append(saved.hooks)
