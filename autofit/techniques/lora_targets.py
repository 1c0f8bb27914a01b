"""lora_targets: which weights get low-rank updates. `lora_rank` applies it; null at rank 0."""

from autofit.core.knobs.lora_targets import KNOB, SETS
from autofit.core.tasks import TASKS
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload


class LoraTargets(Technique):
    """`attention`, `all-linear` (the default beside a rank), `head`, and names, joined by `+`:
    `q_proj+v_proj`, `attention+experts`.

    A name stands for every linear layer, and for the weights of experts, in whose full name it is:
    of a layer, or of a module around it. Experts get adapters by name alone.
    """

    record = KNOB
    stage = Stage.ADAPT
    library = "peft"

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        experts = workload.traits and workload.traits.experts
        if not experts:
            return self.values
        return (*self.values, f"attention+{experts}", f"all-linear+{experts}")

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        if not config.lora_rank:
            return None

        given = set(str(config[self.name] or "all-linear").split("+"))
        parts = sorted(given, key=lambda part: (SETS.get(part, 3), part))
        if TASKS[workload.task].has_new_head and "head" in parts and len(parts) > 1:
            parts.remove("head")  # a classifier's new head is trained whole whatever the targets
        return "+".join(parts)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == "attention" and workload.traits and not workload.traits.attention:
            return "the model has no attention layers; use all-linear."
        return None
