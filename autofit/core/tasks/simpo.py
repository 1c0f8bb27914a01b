"""simpo: to prefer the better of two answers by their mean log-probability, without a reference."""

from autofit.core.task import Script, Task
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
    },
    script=Script(
        templates=("encode", "read_chat", "read_answers"),
        data_kind=".jsonl with prompt, chosen and rejected",
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        slots={
            "what": "Prompts, each with its better and its worse answer",
            "texts": (
                'answers = [(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected")]',
                "data = padded([read_answer(*each, tokenizer) for each in answers], tokenizer)",
            ),
        },
        valid='torch.ones(len(batch["labels"]))',
        loss="simpo_loss",
        loss_templates=("log_probabilities", "simpo_loss"),
        loss_imports=("from torch.nn.functional import cross_entropy, logsigmoid, pad",),
        constants=("BETA = 2.0", "GAMMA = 1.0  # by how much the better answer is to win"),
    ),
    stages={"trl": "trl.experimental.cpo.CPO"},
)
