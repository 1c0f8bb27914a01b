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
    tools={
        "trl": {"loss_type": "kto", "beta": 0.1, "train_sampling_strategy": "sequential"},
        "axolotl": {"rl": "kto", "rl_beta": 0.1},
        "llamafactory": {"stage": "kto", "pref_beta": 0.1},
    },
    stages={"trl": "kto"},
)
