"""context_parallel: over how many devices the tokens of each sample are split."""

from autofit.core.knobs.context_parallel import KNOB
from autofit.core.layout import degrees
from autofit.core.tasks import TASKS
from autofit.setup import Config, Hardware, Setup, Value, Workload
from autofit.setup.split_tokens import split_tokens
from autofit.setup.technique import Degree


class ContextParallel(Degree):
    """By an exchange of heads: each device computes with a part of the tokens, and in attention
    with all tokens of some of the heads. `fsdp` divides weights over these devices, too. null on
    one device."""

    record = KNOB

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """1 for other tasks, else what divides the model's heads, too."""
        if not _is_cut(workload):
            return degrees(hardware, 1)
        return degrees(hardware, workload.traits.heads if workload.traits else 0)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] in (None, 1):
            return None

        if not _is_cut(workload):
            task = "a loss of your own" if workload.loss else workload.task
            return (
                "only samples of causal language models are cut, with their own loss, not "
                f"{task}; use fsdp alone."
            )

        if workload.document_tokens:
            return (
                "packed samples that do not see one another need a mask, which is not exchanged; "
                "use fsdp alone."
            )

        if config.attention == "eager":
            return (
                "eager attention is part of the model's code, and sees no other device's tokens; "
                "use sdpa."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if value != 1:
            split_tokens(setup)

    def trace(self, setup: Setup, value: Value) -> None:
        if value != 1:
            split_tokens(setup, checked=True)  # fake losses have no values


def _is_cut(workload: Workload) -> bool:
    """Whether samples of this workload are cut: by their own loss, of text alone."""
    return TASKS[workload.task].continues_text and workload.loss is None
