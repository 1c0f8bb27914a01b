"""lora_plus: how many times the learning rate of an adapter's first matrix the second one is
trained with. `optimizer` applies it."""

from autofit.core.knobs.lora_plus import KNOB
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class LoraPlus(Technique):
    """null: as fast; 16 is usual (LoRA+, Hayou et al. 2024, arXiv 2402.12354).

    Set by the user, never searched: it changes what is learnt, not memory or speed.
    """

    record = KNOB
    stage = Stage.ADAPT

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (None,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        return config[self.name] if config.lora_rank and config[self.name] != 1 else None

    def package(self, value: Value) -> str:
        return "torch"

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] and workload.optimizer:
            return "an optimizer of your own sets its learning rates itself; leave out lora_plus."
        return None
