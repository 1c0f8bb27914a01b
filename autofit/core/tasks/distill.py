"""distill: to say of each next token what a larger model says of it."""

from dataclasses import replace

from autofit.core.task import TEACHER, Task
from autofit.core.tasks.causal_lm import CAUSAL_LM

DISTILL = Task(
    name="distill",
    medium="text",
    labels="next tokens",
    frozen=(TEACHER,),
    auto_classes=("AutoModelForCausalLM",),
    rows=(("text",), ("prompt", "completion"), ("messages",)),
    packs=True,
    peft_type="CAUSAL_LM",
    script=replace(
        CAUSAL_LM.script,
        loss="distill_loss",
        loss_templates=("distill_loss",),
        loss_imports=("from torch.nn.functional import kl_div",),
    ),
    tools={
        "trl": {"lmbda": 0.0, "beta": 0.0, "temperature": 1.0},
        "msswift": {"rlhf_type": "gkd", "lmbda": 0.0, "beta": 0.0, "temperature": 1.0},
    },
    loss_keys={"trl": {"mixture": "beta"}, "msswift": {"mixture": "beta"}},
    stages={"trl": "trl.experimental.gkd.GKD", "msswift": "rlhf"},
)
