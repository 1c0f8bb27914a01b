"""simpo: to prefer the better of two answers by their mean log-probability, without a reference."""

from dataclasses import replace

from autofit.core.task import Task
from autofit.core.tasks.dpo import DPO

SIMPO = Task(
    name="simpo",
    medium="preferences",
    labels="better answer",
    auto_classes=("AutoModelForCausalLM",),
    rows=(("chosen", "rejected"),),
    peft_type="CAUSAL_LM",
    tools={
        "trl": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        "axolotl": {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        "llamafactory": {
            "stage": DPO.name,
            "pref_loss": "simpo",
            "pref_beta": 2.0,
            "simpo_gamma": 1.0,
        },
        "msswift": {"rlhf_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    },
    loss_keys={
        "trl": {"beta": "beta", "gamma": "simpo_gamma"},
        "axolotl": {"beta": "rl_beta", "gamma": "simpo_gamma"},
        "llamafactory": {"beta": "pref_beta", "gamma": "simpo_gamma"},
        "msswift": {"beta": "beta", "gamma": "simpo_gamma"},
    },
    script=replace(
        DPO.script,
        loss="simpo_loss",
        loss_templates=("log_probabilities", "simpo_loss"),
        constants=("BETA = 2.0", "GAMMA = 1.0  # by how much the better answer is to win"),
    ),
    stages={"trl": "trl.experimental.cpo.CPO", "msswift": "rlhf"},
)
