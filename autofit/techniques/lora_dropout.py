"""lora_dropout: the share of inputs of low-rank updates that is dropped. `lora_rank` applies it."""

from autofit.core.knobs.lora_dropout import KNOB
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class LoraDropout(Technique):
    """null: none.

    Set by the user, never searched: it regularises, and costs time and a mask per adapter.
    """

    record = KNOB
    stage = Stage.ADAPT

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (None,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        if not config.lora_rank:
            return None
        return config[self.name] or None

    def package(self, value: Value) -> str:
        return "peft"
