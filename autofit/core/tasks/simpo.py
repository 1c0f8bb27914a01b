"""simpo: to prefer the better of two answers by their mean log-probability, without a reference."""

from autofit.core.task import Task

SIMPO = Task(
    name="simpo",
    medium="preferences",
    labels="better answer",
    auto_classes=("AutoModelForCausalLM",),
    rows=(("chosen", "rejected"),),
    peft_type="CAUSAL_LM",
)
