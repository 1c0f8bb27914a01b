"""activation_offload: what the forward saves for the backward waits in host memory."""

from autofit.core.knobs.activation_offload import KNOB
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload
from autofit.setup.host_copies import CopyLane
from autofit.setup.saved_tensors import SavedTensorsOnHost


class ActivationOffload(Technique):
    """`cpu`: saved tensors of 1 MiB and more move to pinned host buffers and back, overlapped with
    computation.

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
        """`none` where no gradient reaches a block."""
        return self.off if config.head_only else config[self.name]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] != self.off and hardware.device == "cpu":
            return (
                "on a CPU, device and host share one memory, so nothing would be saved; use none, "
                "or activation_checkpointing."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        _offload(setup, CopyLane.of(setup.device))

    def trace(self, setup: Setup, value: Value) -> None:
        _offload(setup, CopyLane(None, setup.tracing.note_host))


def _offload(setup: Setup, lane: CopyLane) -> None:
    setup.forward_contexts.append(SavedTensorsOnHost(setup.model, lane).hooks)
