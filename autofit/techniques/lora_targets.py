"""lora_targets: which layers get low-rank updates. `lora_rank` applies it; null at rank 0."""

from autofit.core.workload import CLASSIFICATION_TASKS
from autofit.setup import Config, Hardware, Stage, Technique, Value, Workload

_ORDER = {"attention": 0, "all-linear": 1, "all-linear+head": 2}  # each set contains the one before


class LoraTargets(Technique):
    """`attention`, `all-linear` (the default beside a rank) or `all-linear+head`."""

    name = "lora_targets"
    stage = Stage.ADAPT
    off = None
    library = "peft"
    values = ("attention", "all-linear", "all-linear+head")

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        if not config["lora_rank"]:
            return None
        if workload.task in CLASSIFICATION_TASKS and config[self.name] == "all-linear+head":
            return "all-linear"  # a classifier's new head is trained whole whatever the targets
        return config[self.name] or "all-linear"

    def fidelity(self, value: Value) -> int:
        return _ORDER.get(str(value), 0)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == "attention" and workload.traits and not workload.traits.attention:
            return "the model has no attention layers; use all-linear."
        return None

    def memory_order(self, value: Value) -> int | None:
        return _ORDER.get(str(value))
