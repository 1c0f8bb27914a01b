"""orpo: to learn the better of two answers and to prefer it, without a reference."""

from autofit.core.task import Task

ORPO = Task(
    name="orpo",
    medium="preferences",
    labels="better answer",
    auto_classes=("AutoModelForCausalLM",),
    rows=(("chosen", "rejected"),),
    peft_type="CAUSAL_LM",
)
