"""quantization: frozen weights in 8 or 4 bits, dequantised where they are used; the heart of QLoRA."""

from autofit.core.knobs.quantization import KNOB
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload, requirements
from autofit.setup.quantised_layers import NO_LINEARS, quantise, quantise_fake
from autofit.setup.streamed_blocks import is_whole


class Quantization(Technique):
    """`int8`, `nf4`, `nf4-dq` (block scales quantised too: 4.1 bits a weight instead of 4.5) of
    frozen linear layers, and of experts, all of whose values are restored for a forward and, unless
    it recomputes, the backward.

    The output head, embeddings and norms keep their format. A living model's frozen weights stay
    quantised after training. Checkpointing saves less beside `int8`: bitsandbytes holds its inputs
    outside autograd, from the forward to the backward. torchao's NF4 is not used: a step of a
    linear layer was 1.7 to 3.3 times slower than with bitsandbytes (CPU), and its point is sharding
    over several ranks.
    """

    record = KNOB
    stage = Stage.WEIGHTS
    library = "bitsandbytes"

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = config[self.name]
        if value == self.off:
            return None

        if lacking := requirements.missing("bitsandbytes"):
            return f"{value} needs {lacking}, or use none."
        if is_whole(config):
            return "quantised weights cannot be trained; set lora_rank, or use none."

        if workload.traits and not workload.traits.linears:
            return NO_LINEARS
        if config.precision == "fp8":
            return "quantised weights leave nothing to multiply in fp8; use precision bf16."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        quantise(setup, setup.model, str(value), self.name)

    def trace(self, setup: Setup, value: Value) -> None:
        quantise_fake(setup, setup.model, str(value), self.name)
