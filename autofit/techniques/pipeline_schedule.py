"""pipeline_schedule: in which order a stage goes through the micro-batches of a step."""

from autofit.core.errors import pluralize
from autofit.core.knobs.pipeline_schedule import KNOB
from autofit.core.layout import Layout, chunks_of, goes_in_rounds
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload


class PipelineSchedule(Technique):
    """`1f1b` keeps the activations of as many micro-batches as stages follow, `gpipe` those of all.
    `interleaved` halves the time in which stages wait for one another, for twice as many exchanges.

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

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        chunks = chunks_of(config)
        if chunks == 1:
            return None

        stages = Layout.of(config).pipeline
        traits = workload.traits
        if traits and traits.blocks < stages * chunks:
            blocks = pluralize(traits.blocks, "repeated block")
            return f"the model has {blocks}, fewer than {chunks} for each of {stages} stages; use 1f1b."

        micro_batches = config.gradient_accumulation_steps or 1
        if not goes_in_rounds(micro_batches, stages):
            rounds = micro_batches // stages
            return (
                f"{micro_batches} micro-batches do not go through {stages} stages in {rounds} "
                "rounds of as many each; choose a multiple of the stages, or 1f1b."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        """Do nothing: `training.pipeline` reads it."""
