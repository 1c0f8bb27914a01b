"""lora_rslora: low-rank updates are scaled by alpha / sqrt(rank) instead of alpha / rank.

`lora_rank` applies it.
"""

from autofit.core.knobs.lora_rslora import KNOB
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class LoraRslora(Technique):
    """`true`: rank-stabilised (Kalajdzievski 2023, arXiv 2312.03732); meant for a `lora_alpha` that
    is set, since null grows with the rank. Set by the user, never searched: it changes what is
    learnt, not memory or speed."""

    record = KNOB
    stage = Stage.ADAPT
    library = "peft"

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (False,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        return bool(config[self.name] and config.lora_rank)
