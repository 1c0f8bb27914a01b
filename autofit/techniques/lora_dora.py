"""lora_dora: train the length of each adapted weight's rows beside their direction.

`lora_rank` applies it.
"""

from autofit.core.knobs.lora_dora import KNOB
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class LoraDora(Technique):
    """`true`: DoRA (Liu et al. 2024, arXiv 2402.09353).

    Set by the user, never searched: it learns more than LoRA of the same rank, and every forward
    makes the low-rank product of each adapted weight, and the norms of their sum.
    """

    record = KNOB
    stage = Stage.ADAPT
    library = "peft"

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (False,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        return bool(config[self.name] and config.lora_rank)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if not config[self.name]:
            return None

        if config.quantization != "none":
            return (
                "peft reads weights before quantised ones have values; set lora_dora false, or "
                "quantization none."
            )
        if config.data_parallel == "fsdp" or config.tensor_parallel not in (None, 1):
            return "DoRA reads whole weights in each forward; set lora_dora false, or use ddp."
        return None
