"""grpo: to give the answers that a reward prefers, among several that the model itself generates."""

from autofit.core.task import Task

GRPO = Task(
    name="grpo",
    medium="completions",
    labels="rewarded tokens",
    auto_classes=("AutoModelForCausalLM",),
    peft_type="CAUSAL_LM",
    generated=True,
    tools={"trl": {"loss_type": "dapo", "beta": 0.0}},
    stages={"trl": "grpo"},
)
