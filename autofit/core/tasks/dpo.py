"""dpo: to prefer the better of two answers, measured against the model before training."""

from autofit.core.task import REFERENCE, Task

DPO = Task(
    name="dpo",
    medium="preferences",
    labels="better answer",
    frozen=(REFERENCE,),
    auto_classes=("AutoModelForCausalLM",),
    rows=(("chosen", "rejected"),),
    peft_type="CAUSAL_LM",
)
