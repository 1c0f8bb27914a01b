"""distill: to say of each next token what a larger model says of it."""

from autofit.core.task import TEACHER, Task

DISTILL = Task(
    name="distill",
    medium="text",
    labels="next tokens",
    frozen=(TEACHER,),
    auto_classes=("AutoModelForCausalLM",),
    rows=(("text",), ("prompt", "completion"), ("messages",)),
    packs=True,
    peft_type="CAUSAL_LM",
    tools={"trl": {"lmbda": 0.0, "beta": 0.0, "temperature": 1.0}},
    stages={"trl": "trl.experimental.gkd.GKD"},
)
