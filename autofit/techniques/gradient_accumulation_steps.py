"""gradient_accumulation_steps: derived from the batch sizes; written out so that a config is
complete, never set."""

from autofit.core.knobs.gradient_accumulation_steps import KNOB
from autofit.core.layout import dp_degree
from autofit.setup import Config, Hardware, InputError, Stage, Technique, Value, Workload


class GradientAccumulationSteps(Technique):
    """Effective batch / micro batch / ranks that see different samples.

    Nothing to apply: the loop splits batches by micro_batch_size.
    """

    record = KNOB
    stage = Stage.STEP
    all_exact = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """Raises InputError when the batch sizes do not divide, or contradict a given number."""
        effective = workload.effective_batch_size
        ranks = dp_degree(config, hardware)
        if effective % ranks:
            raise InputError(
                f"an effective batch of {effective} cannot be divided among {ranks} devices.",
                f"Choose a multiple of {ranks}, or fewer devices.",
            )

        micro = config.micro_batch_size or effective // ranks
        assert isinstance(micro, int), "micro_batch_size accepts whole numbers only"
        if effective % (micro * ranks):
            devices = f" on each of {ranks} devices" if ranks > 1 else ""

            sizes = [
                str(size) for size in range(1, effective + 1) if not effective % (size * ranks)
            ]
            raise InputError(
                f"micro_batch_size {micro}{devices} does not divide the effective batch of "
                f"{effective}.",
                f"Choose from: {', '.join(sizes)}.",
            )

        steps = effective // (micro * ranks)
        given = config[self.name]
        if given not in (None, steps):
            raise InputError(
                f"gradient_accumulation_steps {given} x micro_batch_size {micro} is not the "
                f"effective batch of {effective}.",
                "Leave it out: it is derived.",
            )
        return steps
