"""kto: to give good answers rather than bad ones, measured against the model before training."""

from autofit.core.task import REFERENCE, Task

KTO = Task(
    name="kto",
    medium="preferences",
    labels="good or bad",
    frozen=(REFERENCE,),
    auto_classes=("AutoModelForCausalLM",),
    rows=(("prompt", "completion", "label"),),
    peft_type="CAUSAL_LM",
)
