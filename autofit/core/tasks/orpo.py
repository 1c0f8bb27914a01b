"""orpo: to learn the better of two answers and to prefer it, without a reference."""

from dataclasses import replace

from autofit.core.task import Task
from autofit.core.tasks.dpo import DPO

ORPO = Task(
    name="orpo",
    medium="preferences",
    labels="better answer",
    auto_classes=("AutoModelForCausalLM",),
    rows=(("chosen", "rejected"),),
    peft_type="CAUSAL_LM",
    tools={
        "trl": {"beta": 0.1},
        "axolotl": {"rl": "orpo", "orpo_alpha": 0.1},
        "llamafactory": {"stage": DPO.name, "pref_loss": "orpo", "pref_beta": 0.1},
        "msswift": {"rlhf_type": "orpo", "beta": 0.1},
    },
    loss_keys={
        "trl": {"beta": "beta"},
        "axolotl": {"beta": "orpo_alpha"},
        "llamafactory": {"beta": "pref_beta"},
        "msswift": {"beta": "beta"},
    },
    script=replace(
        DPO.script,
        loss="orpo_loss",
        loss_templates=("log_probabilities", "orpo_loss"),
        constants=("BETA = 0.1  # the weight of the odds ratio",),
        before_step=("batch = with_tokens(batch)",),
    ),
    stages={"trl": "trl.experimental.orpo.ORPO", "msswift": "rlhf"},
)
