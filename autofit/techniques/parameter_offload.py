"""parameter_offload: weights of the blocks rest in host memory and are streamed to the device when
they run.

By hooks of our own; these were tried and do not serve: accelerate's `cpu_offload` loads a module's
weights for its forward, and autograd holds what was loaded until the backward, so in training
nothing is saved (and trained weights get no gradients). FSDP2's `fully_shard` with
`CPUOffloadPolicy` on one rank replaces a living model's parameters by DTensors: bitsandbytes' int8
weights then fail in the forward, and NF4 weights lose their class, and with it their scales in the
state dict. Quantised weights are the main use.

Trained weights are streamed in one of two ways; in both, neither weights nor gradients of other
blocks are on the device. Predicted for Llama 3.1 8B trained whole in bf16 (samples of 2048 tokens,
one at a time, full checkpointing, chunked loss):
- each backward updates them (`optimizer_in_backward`), so that a block's gradients and update are
  done when it leaves: 20.0 GiB instead of 32.2 with 8-bit AdamW, whose state stays there, and 5.3
  instead of 17.5 with Adafactor. No accumulation.
- the host updates them (`optimizer_offload`) from gradients that follow them there, and come again
  to be added to: 7.0 GiB instead of 31.9 with AdamW, whatever the effective batch; the host holds 8
  bytes for each weight.
"""

from autofit.core.knobs.parameter_offload import KNOB, blocks_streamed
from autofit.core.layout import Layout
from autofit.core.some_blocks import SomeBlocks
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.setup.streamed_blocks import LEAST_BLOCKS, SMALLEST, updated_on
from autofit.setup.streamed_models import TOO_FEW, stream_blocks


class ParameterOffload(Technique):
    """`cpu`: only the running block and the next one have their weights on the device, while
    trained ones are updated the last one, too. `cpu:12`: so it is with twelve blocks, between
    which others stay there.

    Weights tied to something outside their block stay on the device, as do adapters, quantisation
    constants and the optimizer's state. Pinned host memory is allocated in powers of two per
    weight. State dicts read the weights from there.
    """

    record = KNOB
    # After LoRA froze weights and a pipeline was cut, before weights exist: building needs no more
    # memory than running.
    stage = Stage.SHARD
    cuda_values = host_values = ("cpu",)
    all_exact = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """One word where all blocks are alike."""
        return self.in_one_word(config, workload)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off:
            return None

        if hardware.device == "cpu":
            return (
                "on a CPU, device and host share one memory, so nothing would be saved; use none."
            )

        if updated_on(config) == "host" and config.optimizer_offload != "cpu":
            return (
                "trained weights are streamed where the backward or the host updates them; "
                "set optimizer_in_backward, optimizer_offload or lora_rank."
            )
        some = SomeBlocks.of(config[self.name])
        if some and some.number < LEAST_BLOCKS:
            return (
                f"of fewer than {LEAST_BLOCKS} blocks no weight would leave the device; use none."
            )
        stages = Layout.of(config).pipeline
        if workload.traits and workload.traits.blocks // stages < LEAST_BLOCKS:
            return TOO_FEW.format(self.off)
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        _stream(setup, value, CopyLane.of(setup.device))

    def trace(self, setup: Setup, value: Value) -> None:
        _stream(setup, value, CopyLane(None, setup.tracing.note_host))


def _stream(setup: Setup, value: Value, lane: CopyLane) -> None:
    blocks = repeated_blocks(setup.model)
    streamer = stream_blocks(
        setup,
        setup.model,
        [blocks[at] for at in blocks_streamed(value, len(blocks))],
        lane,
        smallest=SMALLEST,
        updated=updated_on(setup.config),
    )
    setup.on_close(streamer.close)
    setup.patch(setup, "value_of", streamer.value_of)
    setup.patch(setup, "host_params", streamer.host_params)
