"""lora_alpha: low-rank updates are scaled by alpha / rank. `lora_rank` applies it."""

from autofit.core.knobs.lora_alpha import KNOB
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class LoraAlpha(Technique):
    """null: 32, whatever the rank.

    Set by the user, never searched: it changes what is learnt, not memory or speed.
    """

    record = KNOB
    stage = Stage.ADAPT

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (None,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        return config[self.name] if config.lora_rank else None

    def package(self, value: Value) -> str:
        return "peft"
