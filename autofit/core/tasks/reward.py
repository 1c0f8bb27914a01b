"""reward: to give the better of two answers the higher score."""

from dataclasses import replace

from autofit.core.task import Task
from autofit.core.tasks.dpo import DPO

REWARD = Task(
    name="reward",
    medium="preferences",
    labels="better text",
    auto_classes=("AutoModelForSequenceClassification",),
    rows=(("chosen", "rejected"),),
    peft_type="SEQ_CLS",
    tools={
        "trl": {"lora_task_type": "SEQ_CLS"},
        "axolotl": {
            "reward_model": True,
            "model_type": "AutoModelForSequenceClassification",
            "num_labels": 1,
        },
        "msswift": {"rlhf_type": "rm"},
    },
    loss_keys={
        tool: {"center": "center_rewards_coefficient"} for tool in ("trl", "axolotl", "msswift")
    },
    stages={"trl": "reward", "msswift": "rlhf"},
    script=replace(
        DPO.script,
        loss="reward_loss",
        loss_templates=("reward_loss",),
        loss_imports=("from torch.nn.functional import logsigmoid",),
        constants=(),
    ),
)
