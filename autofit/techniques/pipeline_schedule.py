"""pipeline_schedule: in which order a stage goes through the micro-batches of a step."""

from autofit.core.knobs.pipeline_schedule import KNOB
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload


class PipelineSchedule(Technique):
    """`1f1b` keeps the activations of as many micro-batches as stages follow, `gpipe` those of all.

    null unless there are several stages. Nothing to apply: the training step reads it.
    """

    record = KNOB
    stage = Stage.SHARD
    all_exact = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        """`1f1b`, which takes as long as `gpipe` and less memory."""
        return ("1f1b",) if hardware.world > 1 else (None,)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        if config.get("pipeline_parallel") in (None, 1):
            return None
        return config[self.name] or "1f1b"

    def apply(self, setup: Setup, value: Value) -> None:
        """Do nothing: `training.pipeline` reads it."""
