"""orpo: to learn the better of two answers and to prefer it, without a reference."""

from autofit.core.task import Script, Task
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
        loss="orpo_loss",
        loss_templates=("log_probabilities", "orpo_loss"),
        loss_imports=("from torch.nn.functional import cross_entropy, logsigmoid, pad",),
        constants=("BETA = 0.1  # the weight of the odds ratio",),
        before_step=("batch = with_tokens(batch)",),
    ),
    stages={"trl": "trl.experimental.orpo.ORPO"},
)
