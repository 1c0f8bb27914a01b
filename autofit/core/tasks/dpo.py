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
    tools={
        "trl": {"loss_type": ["sigmoid"], "beta": 0.1},
        "axolotl": {"rl": "dpo", "rl_beta": 0.1},
        "llamafactory": {"stage": "dpo", "pref_loss": "sigmoid", "pref_beta": 0.1},
    },
    stages={"trl": "dpo"},
)
