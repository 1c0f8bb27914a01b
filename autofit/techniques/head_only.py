"""head_only: train the output layer alone on what the rest of the model makes of its inputs, a
linear probe.

Nothing flows back into the body, so a step is a forward and the gradients of one layer, and what
checkpointing saves does not exist. It learns least of all: a tier of its own beside full training,
LoRA and QLoRA.
"""

from functools import partial

from torch import nn

from autofit.core.knobs.head_only import KNOB
from autofit.setup import Config, Hardware, RefusedError, Setup, Stage, Technique, Value, Workload
from autofit.setup.layers import output_heads

# Of output layers outside transformers.
_NAMES = ("fc", "classifier", "head", "heads", "lm_head", "out", "output", "score")


class HeadOnly(Technique):
    """`true`: all but the output layer is frozen: what a transformers model names, of a classifier
    all linear layers outside its base model, of another module its layer `fc`, `classifier`, `head`
    or the like. Searched where the user sets it alone."""

    record = KNOB
    stage = Stage.ADAPT

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (False,)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if not config[self.name]:
            return None

        if config.lora_rank:
            return "adapters would train beside the head; set lora_rank 0, or head_only false."
        if config.tensor_parallel not in (None, 1):
            return "it was not tried on split layers; use data_parallel alone."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        model = setup.model
        heads = output_heads(model)
        if not heads:
            layers = [getattr(model, name, None) for name in _NAMES]
            heads = [layer for layer in layers if isinstance(layer, nn.Module)]

        inner: set[nn.Module] = set()
        trained: set[nn.Parameter] = set()
        for head in heads:
            inner.update(head.modules())
            trained.update(head.parameters())

        if not trained:
            raise RefusedError(
                f"head_only: the model has no output layer named {', '.join(_NAMES)}; freeze its "
                "weights yourself."
            )

        for module in model.modules():
            if module not in inner and trained & set(module.parameters(recurse=False)):
                raise RefusedError(
                    "head_only: the head's weight is that of the input embedding, too; use "
                    "lora_rank."
                )

        for parameter in model.parameters():
            setup.on_close(partial(parameter.requires_grad_, parameter.requires_grad))
            parameter.requires_grad_(parameter in trained)
