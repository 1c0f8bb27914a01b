"""activation_offload: what the forward keeps for the backward waits in host memory."""

from __future__ import annotations

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique
from autofit.setup.host_copies import CopyLane
from autofit.setup.saved_tensors import SavedTensorsOnHost


class ActivationOffload(Technique):
    """`cpu`: saved tensors of 1 MiB and more go to pinned buffers on the host, beside the computation, and come back.

    Beside activation_checkpointing those are what enters the blocks. Not seen are tensors that are not saved through
    autograd: what `selective` checkpointing keeps, and the inputs that bitsandbytes' int8 layers hold by themselves.
    torch.autograd.graph.save_on_cpu does the like with new buffers for every tensor, on the computing stream (nothing
    overlaps), and moves weights as well.
    """

    name = "activation_offload"
    stage = Stage.BLOCKS
    off = "none"
    values = ("none", "cpu")

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (self.off,) if hardware.device == "cpu" else self.values

    def keeps_on_host(self, value: Value) -> bool:
        return value != self.off

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] != self.off and hardware.device == "cpu":
            return (
                "on a CPU, device and host are the same memory, so nothing would be saved; "
                "use none, or activation_checkpointing."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        offload = SavedTensorsOnHost(setup.model, CopyLane.of(setup.device))
        setup.forward_contexts.append(offload.hooks)

    def trace(self, setup: Setup, value: Value) -> None:
        offload = SavedTensorsOnHost(setup.model, CopyLane(None, setup.note_host))
        setup.forward_contexts.append(offload.hooks)
